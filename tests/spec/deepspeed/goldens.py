"""The corpus of DeepSpeed configs in this folder, and what is told of each. `python -m tests.spec.deepspeed.goldens`
writes the told texts anew; read the difference before it is committed."""

from __future__ import annotations

from pathlib import Path

from weft.spec.config_rules import config_problems
from weft.spec.config_text import format_config
from weft.spec.deepspeed import Imported, import_deepspeed

FOLDER = Path(__file__).parent
#: Ranks with which each config is read; None leaves them open.
RANKS = {
    "trainer_zero2_auto": None,
    "trainer_zero3_auto": 8,
    "zero3_offload_both": 4,
    "zero3_offload_nvme": 4,
    "old_style_2021": None,
    "all_three_numbers": None,
    "warmup_cosine": None,
    "warmup_decay_own_values": 2,
    "one_cycle_adam": 1,
    "sgd_plain": 4,
    "pipeline": None,
    "autotp": 16,
    "removed_features": 16,
    "mics_groups": 16,
    "typos": None,
    "accelerate_written": None,
    "every_tool": 1,
}


def read(name: str) -> Imported:
    """One config of the corpus, as if everything were built: what is built today is another test's business."""
    return import_deepspeed((FOLDER / f"{name}.json").read_text(), RANKS[name], not_built=())


def told(imported: Imported) -> str:
    lines = [f"plan: {imported.plan}"]
    lines += [f"{setting}: {value}" for setting, value in imported.overrides.items()]
    lines += ["", *(str(line) for line in imported.lines), ""]
    lines += [f"open: {', '.join(imported.open)}"] if imported.open else []
    lines += [f"note: {note}" for note in imported.notes]
    return "\n".join(lines).rstrip() + "\n"


def refused(imported: Imported) -> list[str]:
    return [problem.message for problem in config_problems(imported.config())]


if __name__ == "__main__":
    for name in RANKS:
        imported = read(name)
        (FOLDER / f"{name}.txt").write_text(told(imported))
        print(f"== {name} ({RANKS[name]} ranks)\n{told(imported)}")
        format_config(imported.config())
        print(*(f"refused: {text}" for text in refused(imported)), sep="\n")
