"""`weft generate --prompts`: texts for a file of prompts, under a plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft import env
from weft.cli.console import print_line
from weft.config.plan import Plan
from weft.errors import ConfigError
from weft.units import counted, format_seconds, parse_bytes

if TYPE_CHECKING:
    from weft.inference.generate import GenerateReport

PromptsOption = Annotated[Path | None, typer.Option(help="JSONL file of prompts; each text goes to --out.")]
OutOption = Annotated[Path | None, typer.Option("--out", "-o", help="With --prompts: JSONL file to write.")]
PlanOption = Annotated[str, typer.Option("--plan", "-p", help="With --prompts: plan of the ranks, such as tp=2.")]
SamplesOption = Annotated[
    int | None, typer.Option(min=1, max=100_000, help="With --prompts: texts for each prompt.", show_default="1")
]
RowsOption = Annotated[
    int | None, typer.Option(min=1, help="With --prompts: texts in the batch of a rank.", show_default="32")
]
TopPOption = Annotated[
    float, typer.Option(help="With --prompts: sample among the likeliest tokens that add up to this.")
]
DtypeOption = Annotated[
    str | None, typer.Option(help="With --prompts: fp32, bf16, fp16 or fp64.", show_default="the plan's")
]
DeviceOption = Annotated[str, typer.Option(help="With --prompts: as launch.device: auto, cpu, cuda ...")]
MemoryOption = Annotated[
    str | None, typer.Option(help="With --prompts: memory for weights, such as 2GiB; others are read from files.")
]


@dataclass(frozen=True, slots=True)
class FileOptions:
    """Options of `weft generate` that need --prompts, by their names on the command line.

    Attributes:
        samples: texts for each prompt.
        rows: texts in the batch of a rank.
    """

    out: Path | None
    plan: str
    samples: int | None
    rows: int | None
    top_p: float
    dtype: str | None
    device: str
    memory: str | None = None

    def expect_prompts(self, prompts: Path | None) -> None:
        """Raise ConfigError if an option is set without --prompts."""
        named = {"out": self.out, "plan": self.plan, "samples": self.samples, "rows": self.rows}
        named |= {"dtype": self.dtype, "memory": self.memory}
        found = next((name for name, value in named.items() if value), "" if self.top_p == 1 else "top-p")
        if prompts is None and found:
            raise ConfigError(f"--{found}: it belongs to a file of prompts. Add --prompts FILE --out FILE.")
        if prompts is not None and self.out is None:
            raise ConfigError(f"--prompts={prompts}: the texts need a file. Add --out texts.jsonl.")


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Options of `weft generate` that apply to one prompt and to a file of prompts.

    Attributes:
        step: step of a run's checkpoint; None for the newest valid one.
        stops: texts that end a result.
        system: system message, or "".
        raw: True to use prompts without the chat template.
    """

    max_tokens: int
    temperature: float
    top_k: int
    seed: int
    step: int | None
    stops: tuple[str, ...]
    system: str
    raw: bool


def generate_for_file(folder: Path, prompts: Path, options: FileOptions, texts: TextOptions) -> None:
    """Generate texts for all prompts of a file on the ranks of a plan, and print a summary.

    Args:
        folder: a run's folder or a Hugging Face folder.
        prompts: JSONL file.
        options: the other options of files.
        texts: the options of texts.

    Raises:
        ConfigError, DataError: if the prompts or the options are wrong.
    """
    from weft.inference.ranks import inference_plan, read_plan, run_on_ranks

    out = options.out
    assert out is not None
    if out.is_dir() or not out.absolute().parent.is_dir():
        why = "it is a folder" if out.is_dir() else "its folder does not exist"
        raise ConfigError(f"--out={out}: {why}. Give the path of a file.")
    if out.resolve() == prompts.resolve():
        raise ConfigError(f"--out={out}: this is the file of prompts. Give another one.")
    settled, notes = inference_plan(read_plan(options.plan), options.dtype)
    memory = _memory(options.memory, settled, folder)
    place = env.rank_env()
    if settled.world_size > 1 and place is None:
        from weft.verify.rank_pool import start_imports

        start_imports(str(folder) if (folder / "config.json").is_file() else None)
    from weft.generation.requests import Sampling
    from weft.inference.generate import GenerateJob, write_texts
    from weft.inference.prompts import read_prompts

    read_prompts(prompts)  # before ranks start
    sampling = Sampling(texts.max_tokens, texts.temperature, texts.top_k, options.top_p, texts.seed)
    job = GenerateJob(
        str(folder), prompts, out, sampling, options.samples or 1, options.rows or 32, texts.stops, texts.system,
        texts.raw, texts.step, options.dtype, memory,
    )  # fmt: skip
    for note in notes if place is None or place.rank == 0 else ():
        print_line(note)
    report = run_on_ranks(write_texts, settled, job, device=options.device)
    if report is not None:
        _print(report, out)


def _print(report: GenerateReport, out: Path) -> None:
    if report.kept:
        print_line(f"{counted(report.kept, 'text')} of an earlier, unfinished call kept.")
    if report.refused:
        print_line(f'{counted(report.refused, "prompt")} refused: see "error" in {out}.')
    if report.streaming:
        print_line(report.streaming)
    speed = f" in {format_seconds(report.seconds)}" if report.seconds else ""
    print(f"{counted(report.texts, 'text')} with {counted(report.tokens, 'token')}{speed}: {out}")


def _memory(text: str | None, plan: Plan, folder: Path) -> int | None:
    """Return the bytes of --memory, or None without it."""
    if text is None:
        return None
    if plan.tp * plan.pp * plan.ep > 1 or plan.zero == 3:
        raise ConfigError(
            f"--memory={text}: each rank streams whole blocks, and plan={plan} divides them. Use dp_replicate "
            "alone, or leave --memory out."
        )
    if (folder / "config.toml").is_file():
        raise ConfigError(
            f"--memory={text}: {folder} is a run, and weights are streamed from a Hugging Face folder. Write one with "
            f"weft export {folder} FOLDER."
        )
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--memory={text}: {error}.") from None
