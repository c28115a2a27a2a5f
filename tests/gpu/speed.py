"""Stage "speed": Weft beside what people would use in its place, by benchmarks/one_gpu.py."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

from tests.gpu.cases import Case, Figures, Setting, require

ROOT = Path(__file__).parents[2]
#: Least share of the best rival's tokens/s, and most of a step in which no kernel runs.
LEAST_SHARE, MOST_IDLE = 0.97, 0.03


def _beside_rivals(setting: Setting, model: str, length: int, variants: str) -> Figures:
    size = ["--models", "tiny", "--lengths", "32", "--warm", "1", "--steps", "1", "--repeats", "1", "--tokens", "64"]
    if not setting.small:
        size = ["--models", model, "--lengths", str(length)]
    command = [sys.executable, str(ROOT / "benchmarks" / "one_gpu.py"), "--device", setting.device.type, *size]
    done = subprocess.run([*command, "--variants", variants], capture_output=True, text=True, check=True)
    found = {one["variant"]: one for one in json.loads(done.stdout.splitlines()[-1])}
    broken = {name: one["error"] for name, one in found.items() if "error" in one and name.startswith("weft")}
    if broken:
        raise AssertionError(f"Weft did not run: {broken}")
    figures: dict[str, float | int | str] = {
        name: one.get("error", "") or round(one["tokens_per_s"]) for name, one in found.items()
    }
    if setting.is_cuda:
        figures["step ms"] = statistics.median(found["weft-compile"]["step_ms"])
        figures["idle"] = found["weft-compile"]["idle"]
        rivals = [
            one["tokens_per_s"] for name, one in found.items() if not name.startswith("weft") and "error" not in one
        ]
        figures["share of the best rival"] = found["weft-compile"]["tokens_per_s"] / max(rivals)
        require(LEAST_SHARE, float(figures["share of the best rival"]), "least share of the best rival's tokens/s")
        require(float(figures["idle"]), MOST_IDLE, "share of a step in which the GPU waits")
    return figures


def one_billion_4k(setting: Setting) -> Figures:
    """1 B, 8,192 tokens a step in rows of 4,096, beside every rival."""
    variants = "hand,weft" if setting.small else "hand-compile,fsdp2-compile,trainer,liger,weft,weft-compile"
    return _beside_rivals(setting, "1b", 4096, variants)


def one_billion_8k(setting: Setting) -> Figures:
    """1 B, one row of 8,192 tokens."""
    return _beside_rivals(setting, "1b", 8192, "weft" if setting.small else "hand-compile,fsdp2-compile,weft-compile")


def eight_billion_cut(setting: Setting) -> Figures:
    """Eight of 8 B's layers, one row of 8,192 tokens."""
    return _beside_rivals(setting, "8b-cut", 8192, "weft" if setting.small else "hand-compile,weft-compile")


CASES = [
    Case("speed", "1 B at 4k", one_billion_4k, 580),
    Case("speed", "1 B at 8k", one_billion_8k, 400),
    Case("speed", "8 B cut to 8 layers at 8k", eight_billion_cut, 300),
]
