"""Which Hugging Face families train under which technique: `weft verify` of each, on two ranks, as a table.

python benchmarks/models.py                       writes docs/reference/models.md; some 30 minutes on two quiet cores
python benchmarks/models.py --only llama,t5       prints the rows of these alone; --techniques cp,pp: of these columns

Results are kept in build/models.jsonl, one line for each family, and a new run tries only families without a line;
--again tries those of --only, or all, once more.

Models have a few layers of width 16 with random weights, made from transformers' own configs, in float64. A cell is
"equal" where loss, norm, gradients and weights of two steps equal those of PyTorch alone, "refused" where Weft says in
a sentence that it cannot, and anything else is a defect.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import re
import signal
import sys
import tempfile
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.small_configs import small_config
from weft.config.plan import Plan
from weft.models.inspect.hugging_face import load_model_config, model_of_config
from weft.verify.case_data import Settings
from weft.verify.rank_pool import RankPool
from weft.verify.subject import Subject, find_subject
from weft.verify.verifier import Verifier

PLANS = {
    "zero=2": "dp_shard=2 zero=2",
    "zero=3": "dp_shard=2 zero=3",
    "tp": "tp=2",
    "sp": "tp=2 sp=on",
    "cp": "cp=2",
    "pp": "pp=2 microbatches=2",
    "ep": "dp_shard=2 ep=2 zero=1",
}
#: Auto classes whose families are tried, with what they are trained for. A family is tried in the first that has it.
TASKS = {
    "AutoModelForSeq2SeqLM": "sequence to sequence",
    "AutoModelForSpeechSeq2Seq": "speech to text",
    "AutoModelForImageTextToText": "images and text to text",
    "AutoModelForMultimodalLM": "media and text to text",
    "AutoModelForCausalLM": "next token",
    "AutoModelForMaskedLM": "masked token",
    "AutoModelForCTC": "speech, CTC logits",
    "AutoModelForAudioClassification": "sounds",
    "AutoModelForImageClassification": "images",
    "AutoModelForVideoClassification": "videos",
    "AutoModelForSequenceClassification": "classes of texts",
    "AutoModelForTokenClassification": "classes of tokens",
    "AutoModelForMaskedImageModeling": "masked patches",
    "AutoModelForSemanticSegmentation": "segments of images",
    "AutoModelForUniversalSegmentation": "segments of images",
    "AutoModelForDepthEstimation": "depth of images",
    "AutoModelForZeroShotImageClassification": "images and their texts",
    "AutoModelForTimeSeriesPrediction": "time series",
    "AutoModelForTextEncoding": "features of texts",
    "AutoModel": "features",
}
#: More parameters than this: the config has sizes by other names.
MOST_PARAMETERS = 600_000
#: Seconds for one family with all techniques, and for one technique.
LONGEST_S, LONGEST_CELL_S = 240, 60


def families() -> dict[str, tuple[str, str]]:
    """Model type -> its class and its task, each type once."""
    import transformers

    found: dict[str, tuple[str, str]] = {}
    for auto, task in TASKS.items():
        for kind, name in getattr(transformers, auto)._model_mapping._model_mapping.items():
            name = name[0] if isinstance(name, tuple) else name
            found.setdefault(kind, (name, task))
    return found


def subject_of(kind: str, class_name: str, folder: Path, form: int) -> Subject:
    """Write a small config of the family into the folder. Raise ValueError if the model stays large."""
    config = small_config(kind, class_name, form)
    text = {**config.to_dict(), "model_type": config.model_type, "architectures": [class_name]}
    (folder / "config.json").write_text(json.dumps(text))
    with torch.device("meta"):
        model = model_of_config(load_model_config(folder))
    if (number := sum(p.numel() for p in model.parameters())) > MOST_PARAMETERS:
        raise ValueError(f"{number:,} parameters: some sizes have other names")
    return find_subject(str(folder), Settings(num_steps=2, seq_len=16, global_batch=4))


@contextlib.contextmanager
def verifier_of(kind: str, class_name: str, pool: RankPool) -> Iterator[Verifier]:
    """Give the verifier of the first form of the small model that PyTorch alone can train."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as exits:
        errors = []
        for form in range(3):
            try:
                subject = subject_of(kind, class_name, Path(folder), form)
                verifier = exits.enter_context(Verifier(subject, 2, pool))
                break
            except TimeoutError:
                raise
            except Exception as error:  # other people's configs may raise anything
                errors.append(error)
        else:
            raise errors[0]
        yield verifier


def row_of(kind: str, class_name: str, pool: RankPool, techniques: list[str] | None = None) -> dict[str, Any]:
    """Return the inputs of a family, and for each technique "equal", "refused: why" or the failure."""
    cells: dict[str, str] = {}
    with verifier_of(kind, class_name, pool) as verifier:
        case = verifier.subject.build()
        has_experts = any("expert" in name for name, _ in case.model().named_modules())
        inputs = sorted(set(case.batch(0)) - {"labels"})
        for technique in techniques or PLANS:
            if technique == "ep" and not has_experts:
                cells[technique] = ""
                continue
            verdict = verifier.verify(Plan.parse(PLANS[technique]), explain=False)
            if verdict.refused:
                cells[technique] = f"refused: {verdict.refused.splitlines()[0]}"
            elif verdict.error:
                cells[technique] = f"FAILED: {verdict.error.strip().splitlines()[-1]}"
            elif verdict.passed:
                cells[technique] = "equal"
            else:
                own = own_difference(case)
                is_rounding = verdict.max_rel_diff <= 10 * own
                cells[technique] = f"rounding: {own:.0e}" if is_rounding else f"DIFFERS by {verdict.max_rel_diff:.1e}"
    return {"inputs": inputs, "cells": cells}


def own_difference(case: Any) -> float:
    """Return by how much a gradient of PyTorch alone differs if samples or rounding change.

    The samples of a batch come in reverse order, or each weight changes by its last bit. The difference is relative to
    the gradient's norm, or to 1e-6 of the largest one, as in Weft's comparison.

    Raises:
        ValueError: if gradients differ from one call to the next, because forward draws random numbers.
    """
    batch = case.batch(0)
    size = len(next(iter(batch.values())))
    first = _gradients(case, batch)
    norms = {name: float(grad.norm()) for name, grad in first.items()}
    floor = 1e-6 * max(norms.values())

    def difference(grads: dict[str, torch.Tensor]) -> float:
        return max(float((grads[name] - grad).norm()) / max(norms[name], floor) for name, grad in first.items())

    if (again := difference(_gradients(case, batch, seed=1))) > 1e-10:
        raise ValueError(f"PyTorch alone gives other gradients in each run ({again:.0e}): forward draws random numbers")
    found = [difference(_gradients(case, batch, last_bits=True))]
    if all(len(value) == size for value in batch.values()):  # otherwise the rows of an input are not samples
        found.append(difference(_gradients(case, {name: value.flip(0) for name, value in batch.items()})))
    return max(found)


def _gradients(case: Any, batch: Any, seed: int = 0, *, last_bits: bool = False) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(case.model()).double().train()
    torch.manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters() if last_bits else ():
            signs = torch.randint(-1, 2, param.shape, generator=torch.Generator().manual_seed(0)).double()
            param.mul_(1 + signs * 2.0**-52)
    loss, _ = case.loss(case.forward(model, batch), batch)
    loss.backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def _late(*_: Any) -> None:
    raise TimeoutError(f"takes more than {LONGEST_S} s")


def measure(chosen: dict[str, tuple[str, str]], results: Path, techniques: list[str] | None) -> None:
    """Try the families, one line of the results for each: its cells, or the reason why it cannot be tried."""
    pool = RankPool(2, timeout_s=LONGEST_CELL_S)
    signal.signal(signal.SIGALRM, _late)
    for kind, (class_name, task) in chosen.items():
        start = time.perf_counter()
        row: dict[str, Any] = {"family": kind, "task": task}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            signal.alarm(LONGEST_S)
            try:
                row |= row_of(kind, class_name, pool, techniques)
                told = " ".join(f"{name}:{cell.split(':')[0]}" for name, cell in row["cells"].items())
            except Exception as error:  # other people's configs may raise anything
                told = row["reason"] = (" ".join(str(error).split()) or type(error).__name__)[:300]
                if isinstance(error, TimeoutError):
                    pool.close()
                    pool = RankPool(2, timeout_s=LONGEST_CELL_S)
            finally:
                signal.alarm(0)
        row["seconds"] = round(time.perf_counter() - start, 1)
        print(f"{kind:<24} {row['seconds']:5.1f} s  {told}", file=sys.stderr, flush=True)
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
    pool.close()


def read_results(results: Path) -> dict[str, dict[str, Any]]:
    """Rows by family; a later line of a family replaces the earlier."""
    lines = results.read_text().splitlines() if results.exists() else []
    rows = {row["family"]: row for row in map(json.loads, lines)}
    return dict(sorted(rows.items()))


def page(rows: dict[str, dict[str, Any]]) -> str:
    """The table and the reasons, as Markdown."""
    tried = {kind: row for kind, row in rows.items() if "cells" in row}
    cells = Counter(
        cell.split(":")[0].split(" by")[0] for row in tried.values() for cell in row["cells"].values() if cell
    )
    told = (
        f"`python benchmarks/models.py` trained {len(tried)} families of transformers for two steps on two ranks under "
        "each technique, and compared loss, gradient norm, gradients and weights with PyTorch alone (float64, 1e-10). "
        f"{cells['equal']} of {sum(cells.values())} cells are equal. {cells['refused']} are refused with a sentence. "
        f"{cells['rounding']} differ less than 10 times as much as PyTorch alone if its samples come in reverse order "
        "or each weight changes by its last bit. "
        f"{cells['DIFFERS']} give other numbers, and {cells['FAILED']} end in an error that is not Weft's own. The "
        "models have a few layers of width 16 with random weights, so the table shows correctness, not speed."
    )
    lines = [
        "<!-- Written by benchmarks/models.py; run it again instead of editing this page. -->",
        "# Hugging Face families by technique",
        *textwrap.wrap(told, 118),
        "",
        "● equal · ○ rounding · – refused (the footnote has Weft's sentence) · ✗ an error or other numbers · "
        "empty: no experts ·",
        "° a row of an earlier run, with a config of other sizes",
        "",
        "| family | trained for | " + " | ".join(PLANS) + " |",
        "|---|---|" + "---|" * len(PLANS),
    ]
    notes: dict[str, int] = {}
    for kind, row in tried.items():
        marks = []
        for cell in row["cells"].values():
            if cell in ("", "equal") or cell.startswith("rounding"):
                marks.append("" if not cell else "●" if cell == "equal" else "○")
                continue
            number = notes.setdefault(_general(cell), len(notes) + 1)
            marks.append(f"{'–' if cell.startswith('refused') else '✗'} {number}")
        mark = "°" if row.get("earlier") else ""
        lines.append(f"| {kind}{mark} | {_trained_for(row)} | " + " | ".join(marks) + " |")
    lines += ["", "## Reasons", *(f"{number}. {note}" for note, number in notes.items()), ""]
    reasons: dict[str, list[str]] = {}
    for kind, row in rows.items():
        if "reason" in row:
            reasons.setdefault(_why(row["reason"]), []).append(kind)
    if reasons:
        lines += ["## Could not be tried", *(f"- {', '.join(kinds)}: {why}" for why, kinds in reasons.items()), ""]
    if untried := sorted(families().keys() - rows.keys()):
        lines += ["## Not run yet", f"{', '.join(untried)}.", ""]
    return "\n".join(lines)


def _trained_for(row: dict[str, Any]) -> str:
    """Return the task, with "text alone" if a family of several media got only text."""
    inputs = set(row["inputs"])
    is_text = inputs <= {"input_ids", "decoder_input_ids"}
    media = any(word in row["task"] for word in ("images", "media", "speech"))
    return row["task"] + (", text alone" if is_text and media else "")


def _why(reason: str) -> str:
    """Return the reason without the temporary folder and advice on installing."""
    found = re.sub(r"model=\S+?: ", "", reason).partition(" Fix the model, its data")[0]
    found = re.sub(r" You can install it with pip.*| Please note.*", "", found)
    return found.rstrip(".")[:200] + "."


def _general(cell: str) -> str:
    """Return the reason without names of modules and classes, so that families share footnotes."""
    text = cell.partition(": ")[2] or cell
    text = re.sub(r"`?\b[\w*{},]+(?:\.[\w*{},]+)+`?(?:\(.*?\))?", "…", text)
    text = re.sub(r"\b[A-Z][a-z]*\w*(?:For|Model|Attention|Layer|With|Head|LM)\w*", "…", text)
    text = re.sub(r"…(?:,? …)*", "…", text)
    # What a module failed on names its sizes: the kind of error is enough here.
    return re.sub(r"(?:…|\b[a-z]+) \(\S+\) fails on (.*?) \((\w+): .*\)\. If", r"… fails on \1 (\2). If", text)[:240]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="families, with commas")
    parser.add_argument("--out", default="docs/reference/models.md")
    parser.add_argument("--results", default="build/models.jsonl")
    parser.add_argument("--again", action="store_true", help="try families that have a result once more")
    parser.add_argument("--techniques", default="", help="with --only: these alone, with commas; nothing is kept")
    options = parser.parse_args()
    only, techniques = set(filter(None, options.only.split(","))), list(filter(None, options.techniques.split(",")))
    chosen = {kind: found for kind, found in sorted(families().items()) if not only or kind in only}
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "models.jsonl") if techniques else Path(options.results)
        results.parent.mkdir(parents=True, exist_ok=True)
        known = {} if options.again else read_results(results)
        measure({kind: found for kind, found in chosen.items() if kind not in known}, results, techniques or None)
        rows = read_results(results)
    if only:
        print(page({kind: row for kind, row in rows.items() if kind in only}))
    else:
        Path(options.out).write_text(page(rows))


if __name__ == "__main__":
    main()
