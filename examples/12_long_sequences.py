"""Cut one long sequence over ranks (context parallel): each attends to all of it and keeps its own tokens.

python examples/12_long_sequences.py
torchrun --nproc-per-node 2 examples/12_long_sequences.py      the same numbers, half the activations a rank
"""

import torch

import weft
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.env import rank_env
from weft.models.registry import build_decoder
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy

spec = DecoderSpec(vocab_size=64, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=64, max_seq_len=512)
ids = torch.randint(64, (4, 2, 512), generator=torch.Generator().manual_seed(0))

place = rank_env()
with weft.init("cp=2 cp_mode=ring" if place and place.world_size == 2 else "") as run:
    model = run.parallelize(build_decoder(spec, seed=0))
    step = run.train_step(model, torch.optim.AdamW, token_cross_entropy, lr=1e-2, forward=model_forward)
    for rows in ids:  # whole sequences on every rank: the step takes this rank's tokens
        positions = torch.arange(512).repeat(2, 1)
        metrics = step({"input_ids": rows, "labels": rows.roll(-1, 1), "positions": positions})
    if run.is_first:
        print(f"loss {metrics.loss:.4f} over {metrics.num_tokens} tokens a step under {run.plan}")
    del model, step
