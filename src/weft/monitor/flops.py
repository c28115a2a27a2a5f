"""How much arithmetic a token costs, and how much of the device that uses."""

from __future__ import annotations


def flops_per_token(num_params_without_embedding: int, num_layers: int, dim: int, seq_len: int) -> float:
    """Return the FLOPs to train on one token, forward and backward: `6 * N + 12 * num_layers * dim * seq_len`.

    6 N is 2 N for the forward pass (a multiply and an add) and 4 N for the backward pass. The second term is attention:
    scores and weighted sum are 2 products of 2 * dim * seq_len FLOPs a layer and token, three times for forward and
    backward. This is the convention of PaLM (Chowdhery et al. 2022, appendix B) and of Llama's reports: every token is
    counted as attending to all seq_len.
    Some count only the causal half, `6 * num_layers * dim * seq_len`; their MFU is lower for the same speed.
    Recomputed activations are not counted (that would be HFU), nor are norms and element-wise work.

    Args:
        num_params_without_embedding: N, the parameters that multiply: all but the embedding tables, and including the
            head (also where it is tied, because its product with the hidden state is done all the same).
        num_layers: of the model.
        dim: width of the hidden state.
        seq_len: tokens of a sequence.
    """
    return 6.0 * num_params_without_embedding + 12.0 * num_layers * dim * seq_len


def mfu(flops_per_token: float, tokens_per_s: float, peak_flops: float, num_devices: int) -> float:
    """Return the model FLOPs utilisation, 0 to 1: what the model needs a second over what the devices could do at most.

    Args:
        flops_per_token: forward and backward.
        tokens_per_s: over all devices.
        peak_flops: of one device, dense, in the dtype of the products, in FLOP/s.
        num_devices: that train.
    """
    return flops_per_token * tokens_per_s / (peak_flops * num_devices)
