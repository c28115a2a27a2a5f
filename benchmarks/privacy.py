"""Private steps of Weft and of Opacus, interleaved in one run: time, peak memory, and accuracy on digits.

    python benchmarks/privacy.py time               # one rank: plain, one pass, two passes, Opacus hooks and ghost
    python benchmarks/privacy.py time --ranks 2     # data parallel: Weft zero=1, Opacus DPDDP
    python benchmarks/privacy.py memory             # peak bytes of tensors in a step, each mode in turn
    python benchmarks/privacy.py digits             # accuracy at epsilon 8 and 2 over seeds (needs scikit-learn)

The model is a decoder of 2 layers, 128 wide, on 16 sequences of 64 tokens, with one thread. Times are medians of CPU
time, which other programs on the machine change less than wall time, and of wall time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.live_memory import LiveTensors
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.decoder import Decoder
from weft.privacy.settings import Privacy
from weft.train.script.script_run import Run
from weft.verify.rank_pool import RankPool

VOCAB, TOKENS, SAMPLES = 256, 64, 16
Step = Callable[[], Any]


def decoder() -> nn.Module:
    torch.manual_seed(0)
    spec = DecoderSpec(
        vocab_size=VOCAB, dim=128, num_layers=2, num_heads=4, num_kv_heads=4, max_seq_len=TOKENS, ffn_dim=352
    )
    model = Decoder(spec)
    for param in model.parameters():
        if param.ndim > 1:
            nn.init.normal_(param, std=0.02)
    return model


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (SAMPLES, TOKENS + 1), generator=random)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss_fn(output: torch.Tensor, data: Any) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output.flatten(0, 1), data[1].flatten(), reduction="sum"), data[1].numel()


def weft_step(passes: int | None, plan: str = "") -> tuple[nn.Module, Step]:
    """Return a model and its step. passes: number of passes of a private step, or None for a plain step."""
    chosen = Plan.parse(plan)
    run = Run(chosen, build_mesh(chosen), Ledger(), seed=0)
    model, data = run.parallelize(decoder()), batch(run.mesh.rank)
    privacy = None
    if passes is not None:
        privacy = Privacy(10**4, SAMPLES * run.mesh.data.size, 10**6, 1e-5, noise=1.0, key="test:1", passes=passes)
    step = run.train_step(
        model, torch.optim.SGD, loss_fn, lr=1e-2, forward=lambda model, data: model(data[0]), check_batch=False,
        privacy=privacy,
    )  # fmt: skip
    return model, lambda: step(data)


def opacus_step(mode: str, ranks: int = 1, rank: int = 0) -> tuple[nn.Module, Step]:
    """Return a model and its step by Opacus. mode: hooks, ghost, ew or functorch."""
    from opacus import PrivacyEngine
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel

    warnings.filterwarnings("ignore")
    model: Any = decoder()
    if ranks > 1:
        model = DifferentiallyPrivateDistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(10**4, 1)), batch_size=SAMPLES)
    ids, labels = batch(rank)
    options: dict[str, Any] = {"criterion": nn.CrossEntropyLoss()} if mode == "ghost" else {}
    made = PrivacyEngine(accountant="rdp").make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
        poisson_sampling=False, grad_sample_mode=mode, **options,
    )  # fmt: skip
    private, optimizer = made[:2]

    def step() -> None:
        optimizer.zero_grad()
        output = private(ids)
        flat = output.flatten(0, 1), labels.flatten()
        loss = made[2](*flat, shape=(SAMPLES, TOKENS, VOCAB)) if mode == "ghost" else F.cross_entropy(*flat)
        loss.backward()
        optimizer.step()

    return private, step


def measured(steps: dict[str, Step], repeats: int) -> dict[str, tuple[float, float]]:
    """Return the medians of CPU and wall seconds, taking the steps in turn."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for repeat in range(repeats + 3):
        for name, step in steps.items():
            cpu, wall = time.process_time(), time.perf_counter()
            step()
            if repeat >= 3:
                times[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return {
        name: (statistics.median(one for one, _ in found), statistics.median(one for _, one in found))
        for name, found in times.items()
    }


def one_rank(repeats: int) -> dict[str, tuple[float, float]]:
    torch.set_num_threads(1)
    makers: dict[str, Callable[[], tuple[nn.Module, Step]]] = {
        "plain": lambda: weft_step(None),
        "one pass": lambda: weft_step(1),
        "two passes": lambda: weft_step(2),
        "Opacus hooks": lambda: opacus_step("hooks"),
        "Opacus ghost": lambda: opacus_step("ghost"),
    }
    return measured({name: make()[1] for name, make in makers.items()}, repeats)


def two_ranks(repeats: int) -> dict[str, tuple[float, float]]:
    """Run on each of two ranks."""
    torch.set_num_threads(1)
    rank = torch.distributed.get_rank()
    return measured(
        {
            "plain": weft_step(None, "dp_shard=2 zero=1")[1],
            "one pass": weft_step(1, "dp_shard=2 zero=1")[1],
            "two passes": weft_step(2, "dp_shard=2 zero=1")[1],
            "Opacus hooks": opacus_step("hooks", 2, rank)[1],
        },
        repeats,
    )


def print_times(found: dict[str, tuple[float, float]]) -> None:
    plain = found["plain"]
    fastest = min((times for name, times in found.items() if name.startswith("Opacus")), default=None)
    print(f"{'mode':14} {'CPU ms':>8} {'over plain':>11} {'over Opacus':>12} {'wall ms':>9} {'over plain':>11}")
    for name, (cpu, wall) in found.items():
        over = f"{cpu / fastest[0]:.2f}" if fastest is not None else "-"
        print(f"{name:14} {1e3 * cpu:8.1f} {cpu / plain[0]:11.2f} {over:>12} {1e3 * wall:9.1f} {wall / plain[1]:11.2f}")


def memory() -> None:
    torch.set_num_threads(1)
    makers = {
        "plain": lambda: weft_step(None), "one pass": lambda: weft_step(1),
        "two passes": lambda: weft_step(2), "Opacus hooks": lambda: opacus_step("hooks"),
        "Opacus ghost": lambda: opacus_step("ghost"),
    }  # fmt: skip
    for name, make in makers.items():
        model, step = make()
        for _ in range(3):
            step()
        with LiveTensors(model.parameters()) as live:
            step()
        print(f"{name:14} {live.peak / 2**20:8.2f} MiB")


def digits(seeds: int, epochs: int) -> None:
    """Print test accuracies of an MLP on scikit-learn's digits, by Weft and Opacus with equal settings."""
    from opacus import PrivacyEngine
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x / 16, y, test_size=0.25, random_state=0, stratify=y)
    train_x, test_x = (torch.tensor(one, dtype=torch.float32) for one in parts[:2])
    train_y, test_y = (torch.tensor(one) for one in parts[2:])
    data = list(zip(train_x, train_y, strict=True))
    size, clip, lr = 128, 1.0, 1.0
    steps = epochs * len(data) // size

    def net(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))

    def accuracy(model: nn.Module) -> float:
        with torch.no_grad():
            return 100 * float((model(test_x).argmax(1) == test_y).float().mean())

    def loss(output: torch.Tensor, data: Any) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(output, data[1], reduction="sum"), len(data[1])

    for epsilon in (8.0, 2.0):
        privacy = Privacy(len(data), size, steps, 1e-4, epsilon, clip=clip).resolved()
        assert privacy.noise is not None
        ours: list[float] = []
        theirs: list[float] = []
        for seed in range(seeds):
            run = Run(Plan(), build_mesh(Plan()), Ledger(), seed=seed)
            model = run.parallelize(net(seed))
            own = Privacy(len(data), size, steps, 1e-4, noise=privacy.noise, clip=clip, key=f"test:{seed}")
            step = run.train_step(model, torch.optim.SGD, loss, lr=lr, privacy=own, check_batch=False)
            for drawn in run.private_batches(data, step):
                step(drawn)
            ours.append(accuracy(model))
            rival = net(seed)
            optimizer: Any = torch.optim.SGD(rival.parameters(), lr=lr)
            loader: Any = torch.utils.data.DataLoader(data, batch_size=size)
            rival, optimizer, loader = PrivacyEngine().make_private(
                module=rival,
                optimizer=optimizer,
                data_loader=loader,
                noise_multiplier=privacy.noise,
                max_grad_norm=clip,
            )
            done = 0
            while done < steps:
                for some_x, some_y in loader:
                    optimizer.zero_grad()
                    F.cross_entropy(rival(some_x), some_y).backward()
                    optimizer.step()
                    done += 1
                    if done == steps:
                        break
            theirs.append(accuracy(rival))
        spread = statistics.stdev(ours), statistics.stdev(theirs)
        print(
            f"epsilon {epsilon:g}: noise {privacy.noise:.3f}, Weft {statistics.mean(ours):.2f} % (sd {spread[0]:.2f}), "
            f"Opacus {statistics.mean(theirs):.2f} % (sd {spread[1]:.2f}), {seeds} seeds"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["time", "memory", "digits"])
    parser.add_argument("--ranks", type=int, choices=[1, 2], default=1)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    if args.what == "digits":
        digits(args.seeds, args.epochs)
    elif args.what == "memory":
        memory()
    elif args.ranks == 1:
        print_times(one_rank(args.repeats))
    else:
        with RankPool(2, timeout_s=600) as pool:
            found = pool.run(two_ranks, args.repeats)
        print_times({name: max(one[name] for one in found) for name in found[0]})


if __name__ == "__main__":
    main()
