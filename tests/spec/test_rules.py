"""Plan rules: each fires on its case with its text and a fix, and does not fire if facts are unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.comm import block8  # noqa: F401 (registers a wire format with error feedback)
from tests.spec.plans import plans
from weft.config.cluster import device
from weft.config.fields.layout import common_divisors, nearest
from weft.config.partitioning import CP_MODES
from weft.config.plan import Plan, plan_fields
from weft.config.rules.plan_rules import LASTING, NOT_BUILT, RULES, check, check_plan
from weft.config.rules.rule import Facts, alternatives
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.config.shapes.traced_model import Limit
from weft.errors import PlanError

MODEL = DecoderSpec(vocab_size=4096, dim=256, num_layers=6, num_heads=32, num_kv_heads=8, ffn_dim=768, max_seq_len=1024)
FACTS = Facts(model=MODEL, world_size=8, global_batch=16, seq_len=1024)
OPEN = Facts(open_axis="dp_replicate")
#: Limits as found by tracing a model.
TRACED = Facts(limits={
    "tp": Limit((1, 2, 4), "its layers can be shared evenly by 1, 2, 4 ranks"),
    **{name: Limit((1,), "the model reads no sequence that could be cut") for name in ("cp", "ep", "pp")},
    "sp": Limit((0,), "the model reads no sequence that could be cut"),
})  # fmt: skip

CASES = [
    ("model-allows-tp", "tp=3", TRACED,
     "tp=3: its layers can be shared evenly by 1, 2, 4 ranks. Use tp=1, 2 or 4.", "tp=2"),
    ("model-allows-sp", "tp=2 sp=on", TRACED,
     "sp=on: the model reads no sequence that could be cut. Use sp=off.", "tp=2"),
    *((f"model-allows-{name}", f"{name}=2", TRACED,
       f"{name}=2: the model reads no sequence that could be cut. Use {name}=1.", "") for name in ("cp", "ep", "pp")),
    ("compress-needs-data", "tp=2 compress=int8", Facts(),
     "compress=int8: dp_replicate and dp_shard are 1, so no gradient is sent between data ranks. Leave compress out, "
     "or use dp_replicate=2 or more.", "tp=2"),
    ("gather-needs-zero3", "dp_shard=2 zero=2 gather=int8", Facts(),
     "gather=int8: zero=2 gathers no weights before it uses them. Leave gather out, or use zero=3.",
     "dp_shard=2 zero=2"),
    ("compress-feedback-zero", "dp_replicate=2 tp=2 zero=3 compress=int4", Facts(),
     "compress=int4: its rounding error is added to the next step, which is not built for zero=3 with tp. Use "
     "zero=2, or compress=int8, which has no error feedback.", "dp_replicate=2 tp=2 zero=3 compress=int8"),
    ("compress-state-over-shard", "dp_shard=2 zero=3 compress=block8", Facts(),
     "compress=block8: its error feedback needs an unsharded gradient on every rank, which zero=3 does not keep. Use "
     "compress=int8, which has no error feedback, or dp_replicate=2 or more.", "dp_shard=2 zero=3 compress=int8"),
    ("gather-float8-products", "dp_shard=2 zero=3 precision=bf16 gather=fp8", Facts(),
     "gather=fp8: precision=bf16 rounds no weights to float8. Use gather=int8, or precision=fp8.",
     "dp_shard=2 zero=3 precision=bf16 gather=int8"),
    ("gather-differences-zero", "dp_shard=2 zero=3 gather=diff4", Facts(),
     "gather=diff4: zero=3 keeps no unsharded weights to add a difference to. Use gather=int8, or use zero=1.",
     "dp_shard=2 zero=3 gather=int8"),
    ("gather-differences-alone", "dp_shard=2 zero=1 offload=optimizer gather=diff4", Facts(),
     "gather=diff4: differences to masters on the host are not built. Leave gather or offload=optimizer out.",
     "dp_shard=2 zero=1 offload=optimizer"),
    ("second-shards-divide", "dp_shard=6 zero=3 reshard=after_forward:4", Facts(),
     "reshard=after_forward:4: dp_shard=6 is not 2 or more groups of 4 ranks. "
     "Use reshard=after_forward, or a divisor of dp_shard below it.", "dp_shard=6 zero=3"),
    ("shares-need-data-ranks", "pp=2 shares=3+1", Facts(),
     "shares=3+1: they divide samples over dp_replicate and dp_shard, and both are 1. Leave shares out, or use "
     "dp_replicate=2.", "pp=2"),
    ("shares-need-data-ranks", "shares=auto", Facts(),
     "shares=auto: they divide samples over dp_replicate and dp_shard, and both are 1. Leave shares out.", ""),
    ("shares-match-ranks", "dp_replicate=2 dp_shard=2 zero=1 shares=3+1", Facts(),
     "shares=3+1: each of the 4 data-parallel ranks has one share, and 2 are given. Use shares=3+3+1+1.",
     "dp_replicate=2 dp_shard=2 zero=1 shares=3+3+1+1"),
    ("shares-match-ranks", "dp_replicate=2 shares=3+2+1", Facts(),
     "shares=3+2+1: each of the 2 data-parallel ranks has one share, and 3 are given. Use shares=3+2.",
     "dp_replicate=2 shares=3+2"),
    ("shares-match-ranks", "dp_replicate=3 shares=7", Facts(),
     "shares=7: each of the 3 data-parallel ranks has one share, and 1 is given. Use shares=7+7+7.",
     "dp_replicate=3 shares=7+7+7"),
    ("shares-match-ranks", "dp_replicate=999999 shares=3+1", Facts(),
     "shares=3+1: each of the 999999 data-parallel ranks has one share, and 2 are given. Leave shares out.",
     "dp_replicate=999999"),
    ("shares-leave-no-rank-without-samples", "dp_replicate=3 shares=40+3+1", Facts(global_batch=16),
     "shares=40+3+1: of 16 samples data rank 2 gets 0, and each rank needs at least one. Use shares=14+1+1, or "
     "train.global_batch=44.", "dp_replicate=3 shares=14+1+1"),
    ("shares-leave-no-rank-without-samples", "dp_replicate=2 shares=7+1 accumulation=2", Facts(global_batch=8),
     "shares=7+1: of 8 samples data rank 1 gets 1, and each rank needs at least 2, one in each microbatch. Use "
     "shares=3+1, or train.global_batch=16.", "dp_replicate=2 shares=3+1 accumulation=2"),
    ("shares-leave-no-rank-without-samples", "dp_replicate=4 shares=auto", Facts(global_batch=3),
     "shares=auto: of 3 samples data rank 0 gets 0, and each rank needs at least one. Use train.global_batch=4.", None),
    ("shares-not-built", "dp_replicate=2 shares=3+1 compress=int8", Facts(),
     "shares=3+1: unequal shares are not built with compress=int8 yet. Use compress=none, or leave shares out.",
     "dp_replicate=2 compress=int8"),
    ("shares-not-built", "dp_replicate=2 shares=3+1 precision=fp16", Facts(),
     "shares=3+1: unequal shares are not built with precision=fp16 yet. Use precision=bf16, or leave shares out.",
     "dp_replicate=2 precision=fp16"),
    ("sync-needs-replicas", "dp_shard=2 zero=1 sync=diloco:50", Facts(),
     "sync=diloco:50: dp_replicate is 1, so there are no replicas to synchronize. Leave sync out, or use "
     "dp_replicate=2 or more.", "dp_shard=2 zero=1"),
    ("sync-compress", "dp_replicate=2 sync=average:9 compress=int4", Facts(),
     "compress=int4: its error feedback is not built for sync=average:9. Use compress=int8, which has no error "
     "feedback, top:0.02, or sync=step.", "dp_replicate=2 compress=int8 sync=average:9"),
    ("top-needs-sync", "dp_replicate=2 compress=top:0.02", Facts(),
     "compress=top:0.02: it sends few values, which is for changes of weights over many steps. Use e.g. "
     "sync=diloco:50 with dp_replicate=2 or more, or compress=int8.", "dp_replicate=2 compress=int8"),
    ("sync-loss-scale", "dp_replicate=2 precision=fp16 sync=diloco:50", Facts(),
     "precision=fp16: its loss scale would differ between replicas under sync=diloco:50. "
     "Use precision=bf16, or sync=step.", "dp_replicate=2 precision=bf16 sync=diloco:50"),
    ("pp-recompute-budget-not-built", "pp=2 recompute=12GiB", Facts(),
     "recompute=12GiB: a memory budget is not supported under a pipeline yet. "
     "Use recompute=full, selective, attention or none, or e.g. full:4 for four blocks of each rank.",
     "pp=2 recompute=selective"),
    ("pp-offload-activations-not-built", "pp=2 offload=optimizer+activations:0.5", Facts(),
     "offload=optimizer+activations:0.5: activation offload is not supported under a pipeline yet. "
     "Leave activations out, or use recompute=full.", "pp=2 offload=optimizer"),
    ("pp-keeps-gathered", "pp=2 microbatches=8 dp_shard=2 zero=3", Facts(),
     "reshard=after_forward: zero=3 would gather parameters twice for each microbatch of the pipeline. "
     "Use reshard=after_step, which gathers them once in a step, or zero=2.",
     "pp=2 microbatches=8 dp_shard=2 zero=3 reshard=after_step"),
    ("schedule-virtual-stages", "pp=2 schedule=zb_v virtual_stages=3", Facts(),
     "schedule=zb_v: it needs 2 stages on each rank, and virtual_stages is 3. "
     "Use virtual_stages=2, or schedule=1f1b with virtual_stages=1.", "pp=2 schedule=zb_v virtual_stages=2"),
    ("schedule-virtual-stages", "pp=2 schedule=interleaved", Facts(),
     "schedule=interleaved: it needs 2 or more stages on each rank, and virtual_stages is 1. "
     "Use virtual_stages=2, or schedule=1f1b with virtual_stages=1.", "pp=2 schedule=interleaved virtual_stages=2"),
    ("microbatches-in-groups", "pp=4 schedule=interleaved virtual_stages=2 microbatches=6", Facts(),
     "microbatches=6: schedule=interleaved runs microbatches in groups of pp=4. Use microbatches=4 or 8.",
     "pp=4 schedule=interleaved virtual_stages=2 microbatches=8"),
    ("microbatches-fill-dualpipe", "pp=4 schedule=dualpipe_v virtual_stages=2 microbatches=6", Facts(),
     "microbatches=6: schedule=dualpipe_v needs at least 8 with pp=4. "
     "Use microbatches=8 or more, or schedule=zb_v.", "pp=4 schedule=dualpipe_v virtual_stages=2 microbatches=8"),
    ("order-names-axes", "tp=2 dp_shard=4 zero=1 order=tp+pp", Facts(),
     "order=tp+pp: the axes in use are dp_shard, tp. Name each of them once, outermost first, or leave order out.",
     "tp=2 dp_shard=4 zero=1"),
    ("order-is-not-the-default", "tp=2 dp_shard=4 zero=1 order=dp_shard+tp", Facts(),
     "order=dp_shard+tp: this is the default order of these axes. Leave order out.", "tp=2 dp_shard=4 zero=1"),
    ("order-without-ep", "tp=2 dp_shard=4 zero=1 ep=2 order=tp+dp_shard", Facts(),
     "order=tp+dp_shard: ep=2 is a view over dp_shard, cp and tp in their usual order. "
     "Leave order out, or use ep=1.", "tp=2 dp_shard=4 zero=1 ep=2"),
    ("split-needs-pp", "split=2+4", Facts(),
     "split=2+4: it divides the blocks of a pipeline, and pp is 1. Leave split out, or use pp=2 or more.", ""),
    ("split-fits-model", "pp=2 split=2+5", FACTS,
     "split=2+5: there are 2 stages and 6 layers. Use 2 numbers that add up to 6, or leave split out.", "pp=2"),
    ("shard-shares-need-zero", "dp_shard=2 zero=3 shard_shares=3+1", Facts(),
     "shard_shares=3+1: zero=3 divides parameters in equal parts. Use zero=1 or 2, or leave shard_shares out.",
     "dp_shard=2 zero=3"),
    ("shard-shares-need-zero", "dp_replicate=2 shard_shares=3+1", Facts(),
     "shard_shares=3+1: zero=0 divides no states. Use zero=1 or 2, or leave shard_shares out.", "dp_replicate=2"),
    ("shard-shares-match-ranks", "dp_shard=4 zero=2 shard_shares=3+1", Facts(),
     "shard_shares=3+1: each of the 4 ranks of dp_shard has one share, and 2 are given. Use shard_shares=3+1+1+1.",
     "dp_shard=4 zero=2 shard_shares=3+1+1+1"),
    ("shard-shares-are-small", "dp_shard=2 zero=2 shard_shares=100+50", Facts(),
     "shard_shares=100+50: a share is at most 64. Use shard_shares=2+1.", "dp_shard=2 zero=2 shard_shares=2+1"),
    ("shard-shares-not-built", "dp_shard=2 zero=2 shard_shares=3+1 compress=int8", Facts(),
     "shard_shares=3+1: it is not built with compress=int8 yet. Use compress=none, or leave shard_shares out.",
     "dp_shard=2 zero=2 compress=int8"),
    ("recompute-list-matches-pp", "pp=2 recompute=full+none+none", Facts(),
     "recompute=full+none+none: it lists 3 values, one for each rank of pp, and pp is 2. Use recompute=full+none.",
     "pp=2"),
    ("recompute-list-matches-pp", "recompute=full+none", Facts(),
     "recompute=full+none: it lists 2 values, one for each rank of pp, and pp is 1. Use pp=2, or recompute=full.", ""),
    ("offload-list-matches-pp", "pp=4 offload=optimizer:1/0", Facts(),
     "offload=optimizer:1/0: it lists 2 values, one for each rank of pp, and pp is 4. Use offload=optimizer:1/0/0/0.",
     "pp=4"),
    ("lists-without-compile", "pp=2 recompute=full+none compile=on", Facts(),
     "recompute=full+none: policies and shares by rank of pp are not tested with compiled blocks or CUDA graphs. "
     "Use compile=off and graphs=off, or one value for all ranks.", "pp=2 recompute=full+none"),
    ("only-optimizer-by-rank", "pp=2 dp_shard=2 zero=3 reshard=after_step offload=params:1/0", Facts(),
     "offload=params:1/0: only optimizer has a share for each rank of pp. Use one share for all ranks.",
     "pp=2 dp_shard=2 zero=3 reshard=after_step"),
    ("offload-params-needs-zero-3", "offload=params:0.25", Facts(),
     "offload=params:0.25: zero=0 needs all parameters on the device in every pass; zero=3 loads them block by "
     "block. Use zero=3, or offload=optimizer.", "offload=optimizer:0.25"),
    ("world-size", "dp_replicate=2 tp=2", FACTS,
     "world_size=8: the plan needs 4 ranks (dp_replicate=2 * tp=2), but 8 were started. "
     "Start 4 ranks, or put dp_replicate=* in the plan.", "dp_replicate=4 tp=2"),
    ("global-batch", "dp_replicate=4 accumulation=3", FACTS,
     "train.global_batch=16: 4 data-parallel ranks x 3 microbatches "
     "need a multiple of 12 sequences. Use train.global_batch=12 or 24.", "dp_replicate=4 accumulation=2"),
    ("zero-needs-shard", "zero=2", Facts(),
     "zero=2: ZeRO shards over dp_shard and cp, and both are 1. Use zero=0, dp_shard=2 or more, or "
     "offload=params with zero=3.", ""),
    ("zero-needs-shard", "dp_replicate=2 shares=3+1 zero=2", Facts(),
     "zero=2: ZeRO shards over dp_shard and cp, and both are 1. Use dp_shard=2 shares=3+1 zero=2, or zero=0.",
     "dp_shard=2 shares=3+1 zero=2"),
    ("shard-needs-zero", "dp_shard=4", Facts(),
     "dp_shard=4: zero=0 shards nothing, so these ranks would be replicas. Use zero=1, 2 or 3, or dp_replicate=4 for "
     "replicas.",
     "dp_shard=4 zero=1"),
    ("reshard-needs-zero-3", "dp_shard=2 zero=2 reshard=after_step", Facts(),
     "reshard=after_step: zero=2 does not shard parameters. Leave reshard out, or use zero=3.", "dp_shard=2 zero=2"),
    ("tp-heads", "tp=6", FACTS,
     "tp=6: the model has 32 heads, and 32 is not a multiple of 6. Use tp=1, 2, 4 or 8.", "tp=4"),
    ("tp-heads", "tp=4", Facts(model=DecoderSpec(vocab_size=9, dim=48, num_layers=1, num_heads=12, num_kv_heads=6,
                                                 ffn_dim=96, max_seq_len=8)),
     "tp=4: the model has 6 key-value heads, and neither of 6 and 4 is a multiple of the other. "
     "Use tp=1, 2, 3, 6 or 12.", "tp=3"),
    ("tp-ffn", "tp=4", Facts(model=DecoderSpec(vocab_size=9, dim=32, num_layers=1, num_heads=8, num_kv_heads=8,
                                               ffn_dim=70, max_seq_len=8)),
     "tp=4: the model's ffn_dim is 70, and that is not a multiple of 4. Use tp=1 or 2.", "tp=2"),
    ("tp-shared-experts", "tp=4", Facts(model=DecoderSpec(vocab_size=9, dim=32, num_layers=1, num_heads=8,
                                                          num_kv_heads=8, ffn_dim=64, max_seq_len=8, num_experts=4,
                                                          expert_ffn_dim=6, num_shared_experts=1)),
     "tp=4: the model's shared experts are 6 wide, and that is not a multiple of 4. Use tp=1 or 2.", "tp=2"),
    ("sp-divides-sequence", "tp=4 sp=on", Facts(seq_len=1026),
     "train.seq_len=1026: with sp=on, 1 x 4 ranks share the 1026 tokens of a sequence evenly, and 1026 is not a "
     "multiple of 4. Use train.seq_len=1024, or sp=off.", "tp=4"),
    ("sp-needs-tp", "sp=on", Facts(),
     "sp=on: sequence parallelism needs tp of at least 2, and tp is 1. Use sp=off, or tp=2 or more.", ""),
    ("chunks-need-sp", "tp=2 tp_chunks=4", Facts(),
     "tp_chunks=4: it divides sequences that sp=on shards over tp, and sp is off. Use tp_chunks=1, or sp=on with "
     "tp=2 or more.", "tp=2"),
    ("chunks-without-fp8", "tp=2 sp=on tp_chunks=2 precision=fp8", Facts(),
     "tp_chunks=2: precision=fp8 has one scale per full product. Use tp_chunks=1, or precision=bf16.",
     "tp=2 sp=on precision=fp8"),
    ("tiles-are-recomputed", "mlp_tiles=4 recompute=selective", Facts(),
     "mlp_tiles=4: recompute=selective chooses products of an MLP to save, and tiles save none. Use mlp_tiles=1, or "
     "recompute=full or attention.", "recompute=selective"),
    ("tiles-are-recomputed", "mlp_tiles=4 compile=on", Facts(),
     "mlp_tiles=4: compile=on chooses products of an MLP to save, and tiles save none. Use mlp_tiles=1, or "
     "compile=off.", "compile=on"),
    ("tiles-without-fp8", "mlp_tiles=2 precision=fp8", Facts(),
     "mlp_tiles=2: precision=fp8 has scales over all tokens. Use mlp_tiles=1, or precision=bf16.", "precision=fp8"),
    ("pp-layers", "pp=4 virtual_stages=2 schedule=interleaved", FACTS,
     "pp=4: 4 x 2 stages are more than the model's 6 layers. Use pp * virtual_stages of at most 6.",
     "pp=4"),
    ("microbatches-need-pp", "microbatches=4 accumulation=2", Facts(),
     "microbatches=4: it applies to a pipeline, and pp is 1. Use accumulation=8.", "accumulation=8"),
    ("accumulation-without-pp", "pp=2 microbatches=4 accumulation=2", Facts(),
     "accumulation=2: under a pipeline, microbatches is used instead. Use microbatches=8.",
     "pp=2 microbatches=8"),
    ("schedule-needs-pp", "schedule=gpipe", Facts(),
     "schedule=gpipe: it applies to a pipeline, and pp is 1. Leave schedule out, or use pp=2 or more.", ""),
    ("virtual-stages-need-interleaving", "pp=2 virtual_stages=2", Facts(),
     "virtual_stages=2: pp=2 with schedule=1f1b has one stage on each rank. "
     "Use virtual_stages=1, or pp=2 or more with schedule=interleaved.", "pp=2"),
    ("ep-divides-ranks", "dp_shard=4 tp=2 zero=1 ep=3", Facts(),
     "ep=3: experts are sharded over dp_shard x cp x tp = 8 ranks, and that is not a multiple of 3. Use ep=1, 2, 4 "
     "or 8.",
     "dp_shard=4 tp=2 ep=2 zero=1"),
    ("ep-needs-experts", "dp_shard=2 ep=2", FACTS,
     "ep=2: the model has no experts to divide. Use ep=1, or a model with experts, such as model.num_experts=8.",
     "dp_shard=2"),
    ("ep-divides-experts", "dp_shard=8 ep=8 zero=1", Facts(model=replace(MODEL, num_experts=12)),
     "ep=8: the model has 12 experts, and 12 is not a multiple of 8. Use ep=1, 2 or 4.", "dp_shard=8 ep=4 zero=1"),
    ("ep-divides-experts", "ep=8", Facts(model=replace(MODEL, num_experts=12), open_axis="dp_shard"),
     "ep=8: the model has 12 experts, and 12 is not a multiple of 8. Use ep=1, 2, 3, 4, 6 or 12.", "ep=6"),
    ("graphs-on-device", "graphs=on", Facts(device=replace(device("h100"), name="here", title="Xeon")),
     "graphs=on: Xeon is a CPU, which records no graphs. Use graphs=off, or a GPU.", ""),
    ("graphs-on-one-rank", "pp=2 graphs=on", Facts(),
     "graphs=on: a graph contains kernels of one rank only, and the host orders the passes of a pipeline. Use "
     "graphs=off, or only data parallelism with zero=0, 1 or 2.", "pp=2"),
    ("graphs-on-one-rank", "dp_shard=2 zero=3 graphs=on", Facts(),
     "graphs=on: a graph contains kernels of one rank only, and zero=3 gathers weights within forward and backward. "
     "Use graphs=off, or only data parallelism with zero=0, 1 or 2.", "dp_shard=2 zero=3"),
    ("graphs-on-one-rank", "tp=2 graphs=on", Facts(),
     "graphs=on: a graph contains kernels of one rank only, and tp communicates within forward and backward. Use "
     "graphs=off, or only data parallelism with zero=0, 1 or 2.", "tp=2"),
    ("graphs-on-one-rank", "offload=optimizer graphs=on", Facts(),
     "graphs=on: a graph contains kernels of one rank only, and offload=optimizer makes the device and the host wait "
     "for each other. Use graphs=off, or only data parallelism with zero=0, 1 or 2.", "offload=optimizer"),
    ("graphs-on-one-rank", "dp_replicate=2 sync=average:4 graphs=on", Facts(),
     "graphs=on: a graph contains kernels of one rank only, and sync=average:4 changes weights while a step "
     "computes. Use graphs=off, or only data parallelism with zero=0, 1 or 2.", "dp_replicate=2 sync=average:4"),
    ("graphs-without-experts", "graphs=on", Facts(model=replace(MODEL, num_experts=8)),
     "graphs=on: the model has experts, and the host adds up their routers' token counts. Use graphs=off.", ""),
    ("graphs-compiled-recompute", "recompute=full compile=on graphs=on", Facts(),
     "graphs=on: with compile=on and recompute=full, generated code reads the state of torch's generator, which is "
     "impossible while a graph is recorded. Use recompute=none, compile=off, or graphs=off.",
     "recompute=full compile=on"),
    ("cp-divides-sequence", "cp=3", FACTS,
     "cp=3: a sequence has 1024 tokens, and that is not a multiple of its 6 chunks. "
     "Use cp=1, 2, 4 or 8.", "cp=2"),
    ("cp-divides-sequence", "cp=4 cp_mode=ring", Facts(model=MODEL, seq_len=20),
     "cp=4: a sequence has 20 tokens, and that is not a multiple of its 8 chunks. Use cp=1, 2, 5 or 10.",
     "cp=5 cp_mode=ring"),
    ("cp-divides-sequence", "cp=8 cp_mode=ulysses", Facts(model=MODEL, seq_len=20),
     "cp=8: a sequence has 20 tokens, and that is not a multiple of its 8 chunks. Use cp=1, 2, 4, 5, 10 or 20.",
     "cp=10 cp_mode=ulysses"),
    ("ulysses-heads", "cp=4 tp=16 cp_mode=ulysses", FACTS,
     "cp_mode=ulysses: 32 heads and 8 key-value heads cannot be divided evenly over cp=4 and tp=16. Use cp_mode=ring "
     "or cp_mode=gather, which support any number of heads.", "cp=4 tp=16"),
    ("cp-mode-needs-cp", "cp_mode=ring", Facts(),
     "cp_mode=ring: it applies to context parallelism, and cp is 1. "
     "Leave cp_mode out, or use cp=2 or more.", ""),
    ("seq-len-fits-model", "", Facts(model=MODEL, seq_len=4096),
     "train.seq_len=4096: the model reads at most 1024 tokens (model.max_seq_len). "
     "Use train.seq_len=1024 or less.", None),
    ("precision-on-device", "precision=bf16", Facts(device=device("v100")),
     "precision=bf16: NVIDIA V100 SXM2 32 GB has no bf16 arithmetic. Use precision=fp32 or fp16.", "precision=fp16"),
    ("precision-on-device", "precision=tf32", Facts(device=device("mi300x")),
     "precision=tf32: AMD Instinct MI300X 192 GB has no tf32 arithmetic. Use precision=fp32, fp16 or bf16.", ""),
]  # fmt: skip
BY_NAME = {rule.name: rule for rule in RULES}


@pytest.mark.parametrize(("name", "text", "facts", "message", "fix"), CASES)
def test_rule_fires_with_its_text_and_its_fix_satisfies_it(name, text, facts, message, fix):
    rule = BY_NAME[name]
    violation = rule.check(Plan.parse(text), facts)
    assert violation is not None
    assert violation.message == message
    assert violation.fix == (None if fix is None else Plan.parse(fix))
    if violation.fix is not None:
        assert rule.check(violation.fix, facts) is None


def test_every_rule_has_a_case_and_a_one_sentence_reason():
    assert {case[0] for case in CASES} == set(BY_NAME)
    assert len(BY_NAME) == len(RULES)
    for rule in RULES:
        assert rule.reason.endswith(".")
        assert rule.reason.count(". ") == 0
        assert rule.field in plan_fields() or "." in rule.field or rule.field == "world_size"


def test_supported_plans_are_accepted():
    for text in (
        "",
        "dp_replicate=8",
        "dp_replicate=8 accumulation=2 precision=bf16 compile=on",
        "precision=fp64",
        "dp_replicate=2 dp_shard=2 zero=2 accumulation=2 precision=bf16 recompute=selective graphs=on",
        "compile=on graphs=on",
        "recompute=50%",
        *(f"dp_replicate=2 dp_shard=4 zero={stage} precision=fp16" for stage in (1, 2, 3)),
        "offload=optimizer:0.5+activations",
        "pp=2 microbatches=4 split=2+4",
        "pp=2 dp_shard=2 zero=2 microbatches=4 schedule=zb_v virtual_stages=2 recompute=full",
        "cp=4",
        *(f"dp_shard=2 cp=8 cp_mode={mode} zero={stage}" for mode in CP_MODES for stage in (1, 2, 3)),
        *(f"dp_shard=2 tp=4 sp=on zero={stage}" for stage in (1, 2, 3)),
        "tp=16 recompute=selective",
    ):
        assert check(Plan.parse(text), Facts(model=MODEL, global_batch=16, seq_len=1024)) == []
    assert check(Plan(dp_replicate=8), FACTS) == []


def test_reasons_of_unsupported_features_contain_yet():
    for rule in NOT_BUILT:
        assert "yet" in rule.reason, rule.name


def test_open_axis_fits_any_number_of_ranks():
    plan, open_axis = Plan.read_open("dp_replicate=*")
    assert check(plan, Facts(world_size=8, open_axis=open_axis)) == []


@settings(max_examples=80, deadline=None)
@given(plans)
def test_rules_never_fire_on_unknown_facts(plan):
    needs_facts = {"world-size", "global-batch", "tp-heads", "tp-ffn", "tp-shared-experts", "pp-layers",
                   "cp-divides-sequence", "sp-divides-sequence", "ulysses-heads", "ep-needs-experts",
                   "ep-divides-experts", "seq-len-fits-model", "precision-on-device", "split-fits-model"}  # fmt: skip
    assert not needs_facts & {violation.rule for violation in check(plan, Facts(), LASTING)}


@settings(max_examples=80, deadline=None)
@given(plans, st.integers(1, 512))
def test_one_violation_per_field_and_fixes_satisfy_their_rule(plan, global_batch):
    facts = Facts(model=MODEL, global_batch=global_batch, seq_len=1024)
    violations = check(plan, facts)
    assert len({violation.field for violation in violations}) == len(violations)
    for rule in RULES:
        violation = rule.check(plan, facts)
        if violation is not None and violation.fix is not None:
            assert rule.check(violation.fix, facts) is None, violation
            assert "\n" not in violation.message


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 8))
def test_global_batch_rule_is_divisibility(global_batch, replicas, accumulation):
    plan = Plan(dp_replicate=replicas, accumulation=accumulation)
    fired = bool(check(plan, Facts(global_batch=global_batch)))
    assert fired == (global_batch % (replicas * accumulation) != 0)


def test_check_plan_raises_all_violations():
    with pytest.raises(PlanError) as caught:
        check_plan(Plan(sp=True, offload=("params",)), Facts(global_batch=3))
    assert [problem.field for problem in caught.value.problems] == ["offload", "sp"]
    check_plan(Plan())


def test_shard_shares_of_one_rank_are_refused_once():
    found = check(Plan.parse("dp_replicate=2 zero=1 shard_shares=3+1"), Facts())
    assert [violation.rule for violation in found] == ["zero-needs-shard"]


def test_divisors_and_alternatives():
    assert common_divisors(12) == [1, 2, 3, 4, 6, 12]
    assert common_divisors(36, 24) == [1, 2, 3, 4, 6, 12]
    assert nearest([1, 2, 4], 3) == 2
    assert alternatives([1], "tp") == "Use tp=1"
    assert alternatives(list(range(1, 20)), "tp") == "Use tp=1, 2, 3, 4, 5, 6, 7 or 8"
