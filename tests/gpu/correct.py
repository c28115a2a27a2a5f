"""Stage "correct": a device computes the results of a CPU, with the intended kernels and no extra waits."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.nn import functional as F

from tests.gpu.cases import Case, Figures, Setting, Skipped, relative, require
from tests.gpu.training import LARGE, SMALL, Model, batch_of, decoder, foreign, shape_of, step_of, train
from weft.checkpoint.pretrained import Joined, JoinedTensors, stored_weights
from weft.comm.mesh import build_mesh
from weft.comm.transports.backend import NCCL_FORMATS
from weft.config.plan import Plan
from weft.generation.streamed import stream_weights
from weft.models.registry import build_decoder
from weft.monitor.step_times import Meter
from weft.parallel.context.kernels import BOTH_WAYS, CAUSAL, Scoring, attend, attend_backward

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
#: Largest relative difference of losses and norms, by precision of the plan.
TOLERANCES = {"fp64": 1e-10, "fp32": 2e-5, "bf16": 2e-2, "fp16": 2e-2}


def _run(command: list[str], folder: Path, *, hides_gpu: bool = False, **variables: str) -> str:
    """Return the standard output of a command. On failure, raise with its last error lines."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **variables}
    if hides_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def first_example(setting: Setting) -> Figures:
    """The first example of the docs has the same losses on the device and on the CPU."""
    command = [sys.executable, str(ROOT / "examples" / "01_adopt.py")]
    here = _run(command, setting.folder, hides_gpu=not setting.is_cuda)
    there = _run(command, setting.folder, hides_gpu=True) if setting.is_cuda else here
    ours, theirs = (re.findall(r"loss ([\d.]+)", text) for text in (here, there))
    worst = max(abs(float(a) - float(b)) for a, b in zip(ours, theirs, strict=True))
    require(worst, 2e-3, "the losses of examples/01_adopt.py are apart")
    return {"last_loss": float(ours[-1]), "apart": worst}


def train_and_resume(setting: Setting) -> Figures:
    """Run `weft train`, the same command with more steps, and the doctor."""
    steps = 4 if setting.small else 20
    words = [
        "tokenizer.kind=bytes", f"data.train={ROOT / 'README.md'}", "run.name=first", "log.every=1", "train.seq_len=64",
        "train.global_batch=4", "model.dim=32", "model.num_layers=1", "model.num_heads=2", "model.num_kv_heads=2",
        "schedule.warmup_steps=1", "schedule.kind=constant", f"data.cache_dir={setting.folder / 'cache'}",
    ]  # fmt: skip
    losses: dict[str, dict[int, float]] = {}
    for device in dict.fromkeys((setting.device.type, "cpu")):
        place = setting.folder / device
        place.mkdir()
        for end in (steps, steps + 2):
            output = [f"train.steps={end}", f"launch.device={device}", f"run.dir={place}"]
            _run([sys.executable, "-m", "weft", "train", *words, *output], setting.folder)
        events = [json.loads(line) for line in (place / "first" / "events.jsonl").read_text().splitlines()]
        losses[device] = {one["step"]: one["loss"] for one in events if one.get("event") == "step"}
    _run([sys.executable, "-m", "weft", "doctor"], setting.folder)
    ours, theirs = losses[setting.device.type], losses["cpu"]
    if set(ours) != set(range(1, steps + 3)):
        raise AssertionError(f"steps in events.jsonl: {sorted(ours)}")
    worst = max(abs(ours[step] - theirs[step]) for step in theirs)
    require(worst, 2e-3, "losses on the device and on the CPU are apart")
    return {"steps": len(ours), "last_loss": ours[steps + 2], "apart": worst}


def _families(setting: Setting, dtype: torch.dtype) -> dict[str, Model]:
    from dataclasses import replace

    found = {"llama": decoder(SMALL, dtype)}
    if setting.small:
        return found
    found["gpt2"] = decoder(replace(SMALL, family="gpt2", num_kv_heads=4), dtype)
    found["experts"] = decoder(replace(SMALL, num_experts=4, expert_ffn_dim=32), dtype)
    found["hf-llama"] = foreign("Llama", dtype, attn_implementation="sdpa")
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "experts_implementation": "eager"}
    found["hf-qwen3-moe"] = foreign("Qwen3Moe", dtype, **moe)
    return found


def parity_with_the_cpu(setting: Setting) -> Figures:
    """Train five steps of each family in each precision, on the device and on the CPU."""
    figures: dict[str, float] = {}
    for precision, most in TOLERANCES.items():
        dtype = torch.float64 if precision == "fp64" else torch.float32
        for family, model in _families(setting, dtype).items():
            plan = f"precision={precision}"
            ours, theirs = (train(plan, model, device, vocab=101) for device in (setting.device, CPU))
            figures[f"{family} {precision}"] = ours.distance(theirs)
            require(figures[f"{family} {precision}"], most, f"{family} in {precision}: losses or norms apart")
    return figures


def techniques_of_one_device(setting: Setting) -> Figures:
    """Recompute and offload give the results of a plan without them, with less memory."""
    spec, rows, seq_len = shape_of(setting)
    sizes = {"vocab": spec.vocab_size, "steps": 3, "rows": rows, "seq_len": seq_len}
    precision = "fp32" if setting.small else "bf16"
    plain = train(f"precision={precision}", decoder(spec), setting.device, **sizes)
    figures: dict[str, float] = {"peak GiB": plain.peak_bytes / 2**30}
    plans = ["recompute=full", "recompute=attention", "recompute=selective", "recompute=50%", "accumulation=2"]
    plans += ["offload=optimizer", "offload=params", "offload=activations"]
    for plan in plans:
        found = train(f"precision={precision} {plan}", decoder(spec), setting.device, **sizes)
        figures[plan] = found.distance(plain)
        # The same arithmetic in another order of summation: one rounding of the products' format.
        require(figures[plan], TOLERANCES[precision], f"{plan}: losses or norms apart from the plain plan")
        if setting.is_cuda:
            figures[f"{plan} peak GiB"] = found.peak_bytes / 2**30
            if plan != "accumulation=2":
                require(found.peak_bytes, plain.peak_bytes, f"{plan}: peak memory")
    return figures


def no_wait_for_the_device(setting: Setting) -> Figures:
    """Run steps while torch reports every synchronizing call."""
    setting.need_cuda("torch's detector of synchronising calls")
    waits = {}
    for plan in ("precision=bf16", "precision=bf16 accumulation=2", "precision=bf16 recompute=full", "precision=fp16"):
        step = step_of(plan, decoder(LARGE)(), setting.device)
        batches = [
            {name: value.to(setting.device) for name, value in batch_of(index, LARGE.vocab_size, 2, 512).items()}
            for index in range(6)
        ]
        for batch in batches[:2]:
            step(batch)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            import warnings

            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                for batch in batches[2:]:
                    step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found = [f"{Path(one.filename).name}:{one.lineno}" for one in seen if "synchroniz" in str(one.message)]
        waits[plan] = len(found) / 4
        if waits[plan] > 1:  # the only place where the step reads its totals
            raise AssertionError(f"{plan}: {waits[plan]:g} waits a step: {sorted(set(found))}")
    return waits


def no_race(setting: Setting) -> Figures:
    """Check copies on separate streams with torch's CUDA sanitizer."""
    setting.need_cuda("the CUDA sanitizer")
    code = (
        "import torch; from tests.gpu.training import *; "
        "plans = ['offload=optimizer', 'offload=params', 'offload=activations', 'precision=bf16']; "
        "[train(plan, decoder(SMALL), torch.device('cuda:0'), vocab=101) for plan in plans]; print('clean')"
    )
    _run([sys.executable, "-c", code], setting.folder, TORCH_CUDA_SANITIZER="1")
    return {"plans": 4}


def attention_kernels(setting: Setting) -> Figures:
    """Compare the kernels of attention over chunks of a sequence with fp64, forward and backward."""
    heads, length, width = (2, 32, 16) if setting.small else (16, 2048, 128)
    dtype = torch.float32 if setting.small else torch.bfloat16
    most = 1e-4 if setting.small else 2e-2
    draw = torch.Generator().manual_seed(0)
    figures: dict[str, float] = {}
    for name, causal in (("causal", True), ("both ways", False)):
        scoring = Scoring(width**-0.5, CAUSAL if causal else BOTH_WAYS)
        q, k, v, grad = (torch.randn(2, heads, length, width, generator=draw, dtype=torch.float64) for _ in range(4))
        exact = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        expected = F.scaled_dot_product_attention(*exact, is_causal=causal)
        expected.backward(grad)
        ours = [tensor.to(setting.device, dtype) for tensor in (q, k, v)]
        out, lse = attend(*ours, causal, scoring)
        found = attend_backward(grad.to(setting.device, dtype), *ours, out, lse, causal, scoring)
        pairs = zip((out, *found), (expected, *(one.grad for one in exact)), strict=True)
        figures[name] = max(relative(a, b) for a, b in pairs if b is not None)
        require(figures[name], most, f"{name}: attention or a gradient of it is off")
    return figures


def products_in_float8(setting: Setting) -> Figures:
    """Compare a layer's float8 product and gradients with the same roundings multiplied on the CPU, and train five
    steps.
    """
    from weft.parallel.layers.deferred_gradients import linear
    from weft.parallel.layers.float8_products import Float8

    rows, inside, outside = (48, 32, 64) if setting.small else (4096, 2048, 5632)
    draw = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(shape, generator=draw).bfloat16() for shape in ((rows, inside), (outside, inside), (rows, outside))
    )
    made: list[list[torch.Tensor]] = []
    for device in (setting.device, CPU):
        x_here, weight_here = (one.to(device).requires_grad_() for one in (x, weight))
        out = linear(x_here, weight_here, None, None, form=Float8())
        out.backward(grad.to(device))
        assert x_here.grad is not None
        assert weight_here.grad is not None
        made.append([out.detach(), x_here.grad, weight_here.grad])
    names = ("product", "gradient of x", "gradient of weight")
    figures = {name: relative(ours.cpu(), theirs) for name, ours, theirs in zip(names, *made, strict=True)}
    # Hopper's float8 products are accumulated in 14 bits.
    require(max(figures.values()), 1e-2, "products in float8: apart from those of the CPU")
    model = decoder(dataclasses.replace(SMALL, dim=64, ffn_dim=128))
    ours, theirs = (train("precision=fp8", model, device, vocab=101) for device in (setting.device, CPU))
    figures["five steps"] = ours.distance(theirs)
    require(figures["five steps"], 5e-2, "precision=fp8: losses or norms apart from the CPU's")
    return figures


def loss_of_the_head(setting: Setting) -> Figures:
    """Compare the chunked loss with the loss of all logits, in value and in memory."""
    from weft.parallel.tensor.head import LossChunking, token_loss
    from weft.parallel.tensor.linear import SharedLayer

    tokens, dim, vocab = (64, 16, 101) if setting.small else (8192, 2048, 128_256)
    dtype = torch.float32 if setting.small else torch.bfloat16
    torch.manual_seed(0)
    x = torch.randn(1, tokens, dim, dtype=dtype, device=setting.device, requires_grad=True)
    weight = (torch.randn(vocab, dim, dtype=dtype, device=setting.device) / dim**0.5).requires_grad_()
    labels = torch.randint(vocab, (1, tokens), device=setting.device)
    expected = F.cross_entropy((x @ weight.t()).float().flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    grads = [tensor.grad for tensor in (x, weight)]
    x.grad = weight.grad = None
    line = SharedLayer(build_mesh(Plan.parse(""), setting.device)["tp"])
    if setting.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    way = LossChunking.agreed(line.axis, setting.device, compiled=False)
    loss = token_loss(x, weight, None, labels, line, vocab, -100, way)
    loss.backward()
    figures = {"loss": relative(loss, expected)}
    figures |= {
        f"gradient of {name}": relative(tensor.grad, grad)
        for name, tensor, grad in zip(("x", "weight"), (x, weight), grads, strict=True)
        if tensor.grad is not None and grad is not None
    }
    require(figures["loss"], 1e-5, "loss")
    require(max(figures.values()), 1e-4 if setting.small else 2e-2, "gradients")
    if setting.is_cuda:
        held = torch.cuda.max_memory_allocated() - before
        figures["held GiB"] = held / 2**30
        # Two gradients, the fp32 sum of the weight's, and a quarter of the logits.
        require(held, weight.nbytes * 3 + x.nbytes + tokens * vocab * 4 / 4, "bytes held by the loss")
    return figures


def nccl_on_one_rank(setting: Setting) -> Figures:
    """Every collective and format on a communicator of one rank works, or raises a clear error if NCCL refuses it."""
    setting.need_cuda("NCCL")
    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    works = 0
    for dtype in sorted(NCCL_FORMATS, key=str):
        tensor = torch.ones(8, device=setting.device).to(dtype)
        dist.all_gather_into_tensor(torch.empty_like(tensor), tensor)
        dist.broadcast(tensor, 0)
        if dtype.is_floating_point:
            dist.all_reduce(tensor)
            dist.reduce_scatter_tensor(torch.empty_like(tensor), tensor)
        works += 1
    dist.destroy_process_group()
    return {"formats": works}


def one_graph_for_all_blocks(setting: Setting) -> Figures:
    """compile=on: one graph for each kind of block at any depth, and no graph break in a block."""
    from torch._dynamo.utils import counters

    figures: dict[str, float] = {}
    spec = dataclasses.replace(SMALL, num_layers=3) if setting.small else dataclasses.replace(LARGE, num_layers=12)
    rows, seq_len = (2, 16) if setting.small else (2, 1024)
    models: dict[str, Model] = {"llama": decoder(spec)}
    # More layers than torch.compile recompiles for, called with the default cache setting.
    hf = {"num_hidden_layers": 12, "attn_implementation": "sdpa", "use_cache": True}
    models["hf-llama"] = foreign("Llama", **hf)
    if not setting.small:
        models["hf-llama"] = foreign("Llama", **hf, hidden_size=256, intermediate_size=512)
        models["hf-qwen3-moe"] = foreign(
            "Qwen3Moe", **hf, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, hidden_size=64
        )
    for name, model in models.items():
        vocab, length = (spec.vocab_size, seq_len) if name == "llama" else (101, min(seq_len, 64))
        torch._dynamo.reset()
        counters.clear()
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            numbers = train(
                "precision=bf16 compile=on", model, setting.device, vocab=vocab, steps=3, rows=rows, seq_len=length
            )
        if not all(map(math.isfinite, numbers.losses)):
            raise AssertionError(f"{name}: losses {numbers.losses}")
        figures[f"{name} graphs"] = counters["stats"]["unique_graphs"]
        figures[f"{name} breaks"] = sum(counters["graph_break"].values())
        require(figures[f"{name} graphs"], 2, f"{name}: graphs")
        require(figures[f"{name} breaks"], 1, f"{name}: breaks")
    return figures


def honest_meter(setting: Setting) -> Figures:
    """Compare the meter's tokens per second with a clock around the same steps. A NaN step changes nothing."""
    import time

    spec, rows, seq_len = shape_of(setting)
    precision = "fp32" if setting.small else "bf16"
    mesh_device = setting.device
    step = step_of(f"precision={precision}", decoder(spec)(), mesh_device)
    meter = step._meter
    assert isinstance(meter, Meter)
    count = 4 if setting.small else 20
    batches = [batch_of(index, spec.vocab_size, rows, seq_len) for index in range(count + 3)]
    for batch in batches[:3]:
        step(batch)
    _synchronize(setting)
    begin = time.perf_counter()
    for batch in batches[3:]:
        step(batch)
    _synchronize(setting)
    seconds = (time.perf_counter() - begin) / count
    weights = [param.detach().clone() for param in step.model.parameters()]
    with torch.no_grad():
        first = next(step.model.parameters())
        saved = first.detach().clone()
        first.fill_(math.nan)
    before = [param.detach().clone() for param in step.model.parameters()]
    skipped = step(batches[0]).skipped
    changed = [
        not torch.equal(a, b.detach()) for a, b in zip(before[1:], list(step.model.parameters())[1:], strict=True)
    ]
    with torch.no_grad():
        first.copy_(saved)
    if skipped is None or any(changed):
        raise AssertionError(f"a step whose loss is NaN: skipped={skipped}, tensors changed: {sum(changed)}")
    return {"step ms": seconds * 1e3, "tokens/s": rows * seq_len / seconds, "tensors": len(weights)}


def _synchronize(setting: Setting) -> None:
    if setting.is_cuda:
        torch.cuda.synchronize(setting.device)


def out_of_memory_is_explained(setting: Setting) -> Figures:
    """A step that does not fit raises an error with the plan and a remedy."""
    setting.need_cuda("running out of a device's memory")
    limit = 2 * 2**30 / torch.cuda.get_device_properties(setting.device).total_memory
    torch.cuda.set_per_process_memory_fraction(limit, setting.device)
    try:
        train("precision=bf16", decoder(LARGE), setting.device, vocab=LARGE.vocab_size, steps=1, rows=64, seq_len=2048)
    except Exception as error:
        if "recompute" not in str(error) and "microbatch" not in str(error) and "accumulation" not in str(error):
            raise AssertionError(f"no remedy is named: {error}") from error
        return {"names a remedy": 1}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, setting.device)
    raise Skipped("the step fits into 2 GiB")


@torch.no_grad()
def streamed_weights(setting: Setting) -> Figures:
    """Logits with weights that are read from files, or from the host's memory, equal those of weights in memory."""
    spec = dataclasses.replace(SMALL if setting.small else LARGE, num_layers=8)
    model, ids_BT = decoder(spec)().to(setting.device), batch_of(0, spec.vocab_size)["input_ids"].to(setting.device)
    tensors = {name: param.detach().cpu() for name, param in model.named_parameters()}
    save_file(tensors, setting.folder / "model.safetensors", {"format": "pt"})
    stored, wanted, figures = stored_weights(setting.folder), model(ids_BT), dict[str, float]()
    del model
    source = JoinedTensors(stored, {name: Joined.of(name, one) for name, one in stored.entries.items()})
    memory_bytes = sum(tensor.nbytes for tensor in tensors.values()) // 2
    for from_host in (False, True):
        streamed = build_decoder(spec, device="meta")
        with stream_weights(streamed, source, memory_bytes, setting.device, from_host=from_host) as stream:
            for _ in range(4):
                require(float((streamed(ids_BT) - wanted).abs().max()), 0.0, "logits of streamed weights are apart")
            _synchronize(setting)
        figures[f"over bound, {'host' if from_host else 'files'}"] = stream.report.over_bound
    return figures


CASES = [
    Case("correct", "the first example", first_example),
    Case("correct", "weft train, resume, doctor", train_and_resume, 240),
    Case("correct", "parity with the CPU", parity_with_the_cpu, 240),
    Case("correct", "recompute, offload, accumulation", techniques_of_one_device, 240),
    Case("correct", "no wait for the device", no_wait_for_the_device),
    Case("correct", "no race", no_race, 240),
    Case("correct", "attention kernels", attention_kernels),
    Case("correct", "products in float8", products_in_float8),
    Case("correct", "loss of the head", loss_of_the_head),
    Case("correct", "NCCL on one rank", nccl_on_one_rank),
    Case("correct", "one graph for all blocks", one_graph_for_all_blocks, 300),
    Case("correct", "honest meter", honest_meter),
    Case("correct", "streamed weights", streamed_weights),
    Case("correct", "out of memory", out_of_memory_is_explained),
]
