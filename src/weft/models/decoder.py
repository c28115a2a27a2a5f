"""One decoder transformer for two families, in plain PyTorch.

llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases (Touvron et al. 2023, arXiv 2307.09288).
gpt2: learned positions, LayerNorm, GELU, biases (Radford et al. 2019).
Module paths: embed, pos_embed, blocks.N.{norm1, attn.{q,k,v,o}, norm2, mlp.{gate,up,down}}, norm, head;
in layers with experts mlp.{router, experts, shared.{gate,up,down}}.

B sequences, T tokens, D model width, F width of the feed-forward hidden layer, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from weft.config.fields.layout import Layout
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.errors import ModelError
from weft.models.attention import Attention, Rotation, Visible, hide_padding, rotation, see_causally
from weft.models.experts import MoE
from weft.models.kv_cache import Cache, LayerCache
from weft.models.private_torch import KeepsTies

#: Standard deviation of initial matrices, and the name of a module's attribute that overrides it in `initialise`.
INIT_STD, _OWN_STD = 0.02, "init_std"


class SwiGLU(nn.Module):
    """Gated feed-forward layer: down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, ffn_dim: int):
        super().__init__()
        self.gate = nn.Linear(dim, ffn_dim, bias=False)
        self.up = nn.Linear(dim, ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Compute the layer: (B, T, D) to (B, T, D)."""
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class GeluFFN(nn.Module):
    """Feed-forward layer with the tanh approximation of GELU, as in GPT-2."""

    def __init__(self, dim: int, ffn_dim: int):
        super().__init__()
        self.up = nn.Linear(dim, ffn_dim)
        self.down = nn.Linear(ffn_dim, dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Compute the layer: (B, T, D) to (B, T, D)."""
        return self.down(F.gelu(self.up(x_BTD), approximate="tanh"))


class Block(nn.Module):
    """Attention and feed-forward layer, each after a norm and added to its input."""

    def __init__(self, spec: DecoderSpec, layer: int = 0):
        super().__init__()
        gpt2 = spec.family == "gpt2"
        self.norm1 = _norm(spec)
        self.attn = Attention(spec.dim, spec.num_heads, spec.num_kv_heads, bias=gpt2)
        self.norm2 = _norm(spec)
        self.mlp = _feed_forward(spec, layer)

    def forward(
        self, x_BTD: Tensor, visible: Visible, rotation: Rotation | None, cache: LayerCache | None = None
    ) -> Tensor:
        """Compute the block: (B, T, D) to (B, T, D).

        Args:
            x_BTD: hidden states.
            visible: keys that each query attends to.
            rotation: rotary positions, or None for models with learned positions.
            cache: keys and values of earlier tokens; the new ones are appended.
        """
        x_BTD = x_BTD + self.attn(self.norm1(x_BTD), visible, rotation, cache)
        return x_BTD + self.mlp(self.norm2(x_BTD))


class Decoder(KeepsTies):
    """A decoder transformer from token ids to logits of the next token. It does not include a loss."""

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        self.spec, self._head_dim = spec, spec.head_dim
        self.embed = nn.Embedding(spec.vocab_size, spec.dim)
        self.pos_embed = nn.Embedding(spec.max_seq_len, spec.dim) if spec.family == "gpt2" else None
        blocks = [Block(spec, layer) for layer in range(spec.num_layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = _norm(spec)
        self.head = nn.Linear(spec.dim, spec.vocab_size, bias=False)
        self.tie()
        # Each block adds two branches to the residual stream, whose variance would grow with the depth without this
        # scale.
        for branch_end in [end for block in blocks for end in _branch_ends(block)]:
            setattr(branch_end, _OWN_STD, INIT_STD / math.sqrt(2 * spec.num_layers))

    def forward(
        self,
        input_ids_BT: Tensor,
        positions_BT: Tensor | None = None,
        document_ids_BT: Tensor | None = None,
        cache: Cache | None = None,
        document_starts_BM: Tensor | None = None,
        features_ND: Tensor | None = None,
        feature_index_BT: Tensor | None = None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Return the logits (B, T, V) of the token after each input token.

        Args:
            input_ids_BT: int64 token ids.
            positions_BT: position of each token in its document, (B, T) or (1, T); None: 0, 1, 2, ... (after the
                cache).
            document_ids_BT: attention stays within tokens of one id; None: each row is one document.
            cache: keys and values of earlier tokens; the new ones are appended.
            document_starts_BM: start positions of the documents of document_ids, each row padded with T. If None, they
                are computed if the ids are on the CPU.
            features_ND: feature rows that replace tokens, such as rows of images.
            feature_index_BT: index of the feature row that replaces each token; -1 keeps the token.
            logits_to_keep: return only the logits of this many last tokens; 0: of all.

        Raises:
            ModelError: if the sequence is longer than the table of learned positions or the free part of the cache, or
                if `document_ids_BT` is passed with a cache.
        """
        num_seen = cache.num_tokens if cache is not None else 0
        self._check_length(input_ids_BT, document_ids_BT, cache)
        if positions_BT is None:
            end = num_seen + input_ids_BT.shape[1]
            positions_BT = torch.arange(num_seen, end, device=input_ids_BT.device)[None]
        x_BTD = self.embed(input_ids_BT)
        if features_ND is not None and feature_index_BT is not None:
            rows_BTD = features_ND.to(x_BTD.dtype)[feature_index_BT.clamp(min=0)]
            x_BTD = torch.where(feature_index_BT[..., None] < 0, x_BTD, rows_BTD)
        turn = None
        if self.pos_embed is not None:
            x_BTD = x_BTD + self.pos_embed(positions_BT)
        else:
            spec, dtype = self.spec, torch.promote_types(x_BTD.dtype, torch.float32)
            turn = rotation(positions_BT, self._head_dim, spec.rope_theta, spec.rope_scale, dtype)
        # Blocks of other ranks have no attention.
        attentions = [getattr(block, "attn", None) for block in self.blocks]
        cores = [attention.core for attention in attentions if attention is not None]
        if any(getattr(core, "takes_ids", False) for core in cores):
            visible = Visible(None, positions_BT, document_ids_BT)
        else:
            wants_mask = any(getattr(core, "takes_mask", True) for core in cores)
            visible = see_causally(
                positions_BT, document_ids_BT, num_seen, _attention_dtype(x_BTD),
                starts_BM=document_starts_BM, wants_mask=wants_mask,
            )  # fmt: skip
        if cache is not None and cache.starts_B is not None:
            visible = hide_padding(visible, cache.starts_B, num_seen, _attention_dtype(x_BTD))
        for index, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, visible, turn, cache.layers[index] if cache is not None else None)
        return self.head(self.norm(x_BTD[:, -logits_to_keep:]))

    @property
    def family(self) -> str:
        """Family of the layers: "llama" or "gpt2"."""
        return self.spec.family

    @property
    def has_routers(self) -> bool:
        """True if some layers have experts."""
        return self.spec.num_experts > 0

    def tensor_layout(self) -> Layout:
        """Return the tensor-parallel layout of the model."""
        if not self.has_routers:
            return Layout.named(self.family)
        # Which layers have experts, and whether some are shared, depends on the model.
        return Layout.named("moe").fitted(dict(self.named_modules()))

    def get_output_embeddings(self) -> nn.Module:
        """Return the output layer, under the method name that transformers uses."""
        return self.head

    def _check_length(self, input_ids_BT: Tensor, document_ids_BT: Tensor | None, cache: Cache | None) -> None:
        num_tokens = input_ids_BT.shape[1]
        if self.pos_embed is not None and num_tokens > self.spec.max_seq_len:
            raise ModelError(
                f"sequence of {num_tokens} tokens: the model has a table of {self.spec.max_seq_len} positions. "
                f"Use at most {self.spec.max_seq_len} tokens, or a larger model.max_seq_len."
            )
        if cache is None:
            return
        if document_ids_BT is not None:
            raise ModelError("document_ids with a cache: a cache has one document. Leave document_ids out.")
        if cache.max_tokens is not None and cache.num_tokens + num_tokens > cache.max_tokens:
            raise ModelError(
                f"cache of {cache.max_tokens} tokens: it holds {cache.num_tokens}, and {num_tokens} more do not fit. "
                f"Make one for {cache.num_tokens + num_tokens} tokens."
            )

    def is_tied(self) -> bool:
        """Return True if embedding and head share one weight on this rank. A pipeline stage may lack one of them."""
        return self.head.weight is self.embed.weight

    def tie(self) -> None:
        """Make embedding and head share one weight if the spec ties them."""
        if self.spec.tied:
            self.head.weight = self.embed.weight


def _branch_ends(block: Block) -> list[nn.Module]:
    mlp = block.mlp
    if isinstance(mlp, MoE):
        return [block.attn.o, mlp.experts, *([mlp.shared.get_submodule("down")] if mlp.shared is not None else [])]
    return [block.attn.o, mlp.get_submodule("down")]


def _feed_forward(spec: DecoderSpec, layer: int) -> nn.Module:
    if spec.family == "gpt2":
        return GeluFFN(spec.dim, spec.ffn_dim)
    if layer not in spec.moe_layers:
        return SwiGLU(spec.dim, spec.ffn_dim)
    width = spec.num_shared_experts * spec.expert_width
    return MoE(spec, SwiGLU(spec.dim, width) if width else None)


def _norm(spec: DecoderSpec) -> nn.Module:
    return nn.LayerNorm(spec.dim, spec.norm_eps) if spec.family == "gpt2" else nn.RMSNorm(spec.dim, spec.norm_eps)


def _attention_dtype(x_BTD: Tensor) -> torch.dtype:
    device = x_BTD.device.type
    has_autocast = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if has_autocast else x_BTD.dtype


# Models built without values, so that large models are sharded before weights are allocated.

#: Random functions of initializers, as tensor methods or in torch.nn.init, whose other functions call these. They are
#: matched by name because libraries replace them by their own functions. On the meta device each call would run a slow
#: decomposition in Python for nothing.
_DRAWS = frozenset({"normal_", "uniform_", "kaiming_uniform_"})


class _WithoutDraws(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if getattr(func, "__name__", "") in _DRAWS and (filled := args[0] if args else named["tensor"]).is_meta:
            return filled
        return func(*args, **named)


@contextmanager
def as_shapes(*, vectors: bool = False) -> Iterator[None]:
    """Put the matrices of modules that are built inside the context on the meta device, without memory or values.

    Vectors (norms, biases) and buffers are small, and only the model's code can compute their values, so they are
    initialized as usual. Later, `parallelize` with a seed or a checkpoint fills each rank's shard of the matrices.

    Args:
        vectors: True to put vectors on the meta device too, for models that are loaded from files. Buffers keep their
            values.
    """
    least = 0 if vectors else 2

    def without_values(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        """Return the parameter to register instead of this one, or None to register this one."""
        del module, name
        if param is None or param.is_meta or param.ndim < least:
            return None
        return nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)

    handle = register_module_parameter_registration_hook(
        without_values  # pyright: ignore[reportArgumentType] - torch documents this return value; its stub declares None
    )
    try:
        with _WithoutDraws():
            yield
    finally:
        handle.remove()
