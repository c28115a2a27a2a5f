"""`weft verify`: prove that a plan gives the same training as one process, on the user's own model."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.console import print_line
from weft.config.plan import Plan
from weft.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from weft.verify.subject import Subject, Sweep
    from weft.verify.verifier import Verdict

#: Exit code if no plan could be verified.
PROVED_NOTHING = 3
_DTYPES = ("float64", "float32", "bfloat16", "float16")
_MODEL_HELP = "A size (`weft models`), run.toml, a Hugging Face folder or OWNER/NAME, or package.module:function."
_PLAN_HELP = 'A plan such as "dp_shard=2 zero=3"; by default the plan of run.toml.'
_FULL_HELP = "With --all: try every combination of settings instead of each layout once and all pairs of settings."
_SAMPLE_HELP = "With --all: try at most this many plans, drawn at random with --seed."
_PART_HELP = 'With --all: try only one part of the plans, such as "2/10".'
_PRIVACY_HELP = "Compare private steps, with clipping and noise, with a loop over single samples."
_BATCH_HELP = "Samples per step; by default 8, with --all 4 per rank."


def verify(
    model: Annotated[str, typer.Option("--model", "-m", help=_MODEL_HELP)] = "tiny",
    plan: Annotated[str | None, typer.Option("--plan", "-p", help=_PLAN_HELP, show_default=False)] = None,
    all_ranks: Annotated[int | None, typer.Option("--all", help="Verify every legal plan of this many ranks.")] = None,
    full: Annotated[bool, typer.Option("--full", help=_FULL_HELP)] = False,
    sample: Annotated[int | None, typer.Option("--sample", min=1, help=_SAMPLE_HELP)] = None,
    part: Annotated[str | None, typer.Option("--part", help=_PART_HELP, show_default=False)] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps.")] = 3,
    dtype: Annotated[
        str, typer.Option("--dtype", help=f"One of {', '.join(_DTYPES)}; overrides the plan's precision.")
    ] = "float64",
    seq_len: Annotated[int, typer.Option("--seq-len", min=1, help="Tokens in a sequence.")] = 32,
    global_batch: Annotated[int | None, typer.Option("--global-batch", min=1, help=_BATCH_HELP)] = None,
    layers: Annotated[int | None, typer.Option("--layers", min=1, help="Reduce the model to this many layers.")] = None,
    width: Annotated[int | None, typer.Option("--width", min=2, help="Reduce the model to this width.")] = None,
    vocab: Annotated[int | None, typer.Option("--vocab", min=2, help="Reduce the vocabulary to this size.")] = None,
    layout: Annotated[
        str,
        typer.Option("--layout", help=("pattern=style entries or a file of them; by default derived from the model.")),
    ] = "",
    engine: Annotated[str, typer.Option("--engine", help="torch, or jax: one program on virtual devices.")] = "torch",
    privacy: Annotated[bool, typer.Option("--privacy", help=_PRIVACY_HELP)] = False,
    seed: Annotated[int, typer.Option("--seed", help="Seed of weights, data and samples.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train some steps under a plan and in one process, and compare every number.

    Exit code 0: equal within the tolerance of the dtype; 1: different, or a rank failed; 2: bad input; 3: nothing was
    proven, because the model refused every plan.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype={dtype}: not one of {', '.join(_DTYPES)}. Use float64.")
    _check_choice(engine, plan, all_ranks, privacy)
    choice = _Choice(full, sample, read_part(part))
    if all_ranks is None and choice != _Choice():
        given = next(name for name, value in (("full", full), ("sample", sample), ("part", part)) if value)
        raise ConfigError(f"{given}=: it selects among the plans of --all. Use it with --all.")
    from weft.config.fields.layout import Layout
    from weft.config.shapes.model_spec import size_hides
    from weft.verify.rank_pool import start_imports

    start_imports(model)
    from weft.verify.case_data import Settings
    from weft.verify.subject import find_subject

    if note := size_hides(model):
        print_line(note)
    settings = Settings(steps, dtype, seq_len, global_batch or 4 * (all_ranks or 2), seed, layers, width, vocab)
    subject = find_subject(model, settings)
    longest = subject.shape.max_seq_len if subject.shape is not None else seq_len
    if seq_len > longest:
        raise ConfigError(f"seq-len={seq_len}: the model reads at most {longest} tokens. Use --seq-len {longest}.")
    if layout:
        subject = replace(subject, layout=Layout.read(layout))
    if all_ranks is not None:
        raise typer.Exit(_verify_all(subject, all_ranks, choice, as_json))
    if not (text := plan if plan is not None else subject.plan):
        raise PlanError("plan=: give --plan, or --all with a number of ranks.")
    one = Plan.parse(text)
    raise typer.Exit(_verify_private(subject, one, as_json) if privacy else _verify_one(subject, one, engine, as_json))


def _check_choice(engine: str, plan: str | None, all_ranks: int | None, privacy: bool) -> None:
    if privacy and (all_ranks is not None or engine != "torch"):
        raise ConfigError("privacy=: private steps are verified under one plan of the torch engine. Give --plan.")
    if engine not in ("torch", "jax"):
        raise ConfigError(f"engine={engine}: not one of torch, jax. Use torch.")
    if engine == "jax" and all_ranks is not None:
        raise ConfigError("engine=jax: --all tries plans of the torch engine. Give one plan with --plan.")
    if all_ranks is not None and (plan is not None or not 1 <= all_ranks <= 64):
        fix = "Leave plan out" if plan is not None else "Use 2, 4 or 8"
        raise ConfigError(f"all={all_ranks}: the rules can list the legal plans of 1 to 64 ranks. {fix}.")


@dataclass(frozen=True, slots=True)
class _Choice:
    """Selection among all plans: all of them, at most `sample` of them, or a part such as (2, 10), the second of 10."""

    full: bool = False
    sample: int | None = None
    part: tuple[int, int] = (1, 1)


def read_part(text: str | None) -> tuple[int, int]:
    """Parse `2/10` as (2, 10), and None as (1, 1). Raise ConfigError for other texts."""
    number, _, count = (text or "1/1").partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ConfigError(f"part={text}: a part has the form NUMBER/COUNT. Use e.g. 2/10.")
    return int(number), int(count)


def _verify_one(subject: Subject, plan: Plan, engine: str, as_json: bool) -> int:
    from weft.verify.verifier import Verifier, check_subject

    check_subject(subject, plan)
    if engine == "jax":
        from weft.jax_engine.rules import check

        check(plan)  # before the reference is computed
        from weft.verify.jax_verifier import JaxVerifier
    with JaxVerifier(subject) if engine == "jax" else Verifier(subject, plan.world_size) as verifier:
        verdict = verifier.verify(plan)
    if verdict.refused:
        raise PlanError(verdict.refused)
    if as_json:
        print(json.dumps(verdict.to_json()))
    else:
        for note in verifier.notes:
            print_line(note)
        print("\n".join([f"model    {subject.source}", *describe(verdict)]))
    return 0 if verdict.passed else 1


def _verify_private(subject: Subject, plan: Plan, as_json: bool) -> int:
    from weft.verify.private_steps import describe_private, verify_private
    from weft.verify.verifier import check_subject

    check_subject(subject, plan)
    verdict = verify_private(subject, plan)
    lines = [f"model    {subject.source}", *describe_private(verdict)]
    print(json.dumps(verdict.to_json()) if as_json else "\n".join(lines))
    return 0 if verdict.passed else 1


def _verify_all(subject: Subject, num_ranks: int, choice: _Choice, as_json: bool) -> int:
    from weft.config.rules.plan_rules import check
    from weft.verify.matrix import layout_of, legal
    from weft.verify.subject import Sweep, covering_plans
    from weft.verify.verifier import Verifier

    settings, facts = subject.settings, subject.facts(num_ranks)
    sizes: dict[str, Any] = {"model": subject.shape, "global_batch": subject.even_batch, "seq_len": settings.seq_len}
    every = [plan for plan in legal(num_ranks, **sizes, passes=(1, 2), precision=("fp32",)) if not check(plan, facts)]
    if not every:
        raise PlanError(
            f"all={num_ranks}: no plan of {num_ranks} ranks is legal for this model and "
            f"global_batch={settings.global_batch}. Use another global_batch, such as {4 * num_ranks}."
        )
    sweep = Sweep(every, list if choice.full else covering_plans, choice.sample, settings.seed)
    number, count = choice.part
    layouts = len({layout_of(plan) for plan in every})
    of = f"; part {number} of {count}" if count > 1 else ""
    print_line(f"{len(every)} legal plans of {num_ranks} ranks, {layouts} layouts{of}")
    start = time.perf_counter()
    verdicts: list[Verdict] = []
    with Verifier(subject, num_ranks) as verifier:
        for note in verifier.notes:
            print_line(note)
        for plan in sweep.part(number, count) if count > 1 else sweep.plans():
            verdict = verifier.verify(plan)
            verdicts.append(verdict)
            if verdict.refused:
                sweep.refuse(plan, verdict.refused)
            # Print each verdict immediately, so that results are not lost if a long run is interrupted.
            print(f"{len(verdicts):>4}  {_line(verdict)}", file=sys.stderr if as_json else sys.stdout, flush=True)
    seconds = time.perf_counter() - start
    if as_json:
        print(json.dumps(_summary(subject, num_ranks, sweep, verdicts, seconds)))
    else:
        print("\n".join(_closing(sweep, verdicts, seconds)))
    if any(not one.passed and not one.refused for one in verdicts):
        return 1
    return 0 if any(one.passed for one in verdicts) else PROVED_NOTHING


def _closing(sweep: Sweep, verdicts: list[Verdict], seconds: float) -> list[str]:
    wrong = [one for one in verdicts if not one.passed and not one.refused]
    lines = [_line(one) for one in wrong]
    for asked, reason in sweep.reasons().items():
        lines.append(f"refused  {asked}: {reason.splitlines()[0]}")
    left_out = len(sweep.every) - len(sweep.allowed())
    num_equal = sum(one.passed for one in verdicts)
    lines.append(
        f"{num_equal} plans equal one process, {len(wrong)} do not, in {seconds:.0f} s; "
        f"the model refuses {left_out} of {len(sweep.every)} legal plans"
    )
    if not num_equal and not wrong:
        lines.append("nothing was verified: the model refused every plan that was tried")
    return lines


def _summary(
    subject: Subject, num_ranks: int, sweep: Sweep, verdicts: list[Verdict], seconds: float
) -> dict[str, object]:
    num_passed = sum(one.passed for one in verdicts)
    return {
        "model": subject.source,
        "ranks": num_ranks,
        "legal": len(sweep.every),
        "verified": len(verdicts),
        "passed": bool(num_passed) and all(one.passed or one.refused for one in verdicts),
        "num_passed": num_passed,
        "num_refused": sum(bool(one.refused) for one in verdicts),
        "refused": sweep.reasons(),
        "seconds": seconds,
        "plans": [replace(one, parameters={}).to_json() for one in verdicts],
    }


def describe(verdict: Verdict) -> list[str]:
    """Return a plan's verdict as lines: steps, the parameters that differ most, and the first difference."""
    lines = [f"plan     {verdict.plan or 'one rank'}", f"dtype    {verdict.dtype}"]
    if verdict.error:
        return [*lines, f"failed   {verdict.error}"]
    lines.append("step     loss: plan, one process             grad norm: plan, one process")
    rows = zip(verdict.loss, verdict.reference_loss, verdict.grad_norm, verdict.reference_grad_norm, strict=True)
    for step, (loss, other, norm, other_norm) in enumerate(rows, 1):
        lines.append(f"{step:<8} {loss:<16.12g} {other:<18.12g} {norm:<16.12g} {other_norm:.12g}")
    most = sorted(verdict.parameters.items(), key=lambda item: -item[1])[:5]
    lines += [f"{apart:<8.1e} {name}" for name, apart in most]
    if verdict.parts:
        lines.append(f"parts    first in {verdict.parts}")
    lines += [f"cause    {cause}" for cause in verdict.causes]
    word = "equal" if verdict.passed else "DIFFERS"
    if not verdict.passed and (rounding := _rounding(verdict.plan)):
        lines.append(f"note     {rounding} changes what ranks send, so differences from one process are expected")
    return [*lines, f"{word}: the largest relative difference is {verdict.max_rel_diff:.1e} ({verdict.seconds:.1f} s)"]


def _rounding(plan_text: str) -> str:
    """Return the settings of a plan that round or delay communication."""
    plan, usual = Plan.parse(plan_text), Plan()
    names = [name for name in ("reduce", "compress", "gather", "sync") if getattr(plan, name) != getattr(usual, name)]
    return " ".join(f"{name}={getattr(plan, name)}" for name in names)


def _line(one: Verdict) -> str:
    word = "equal" if one.passed else "refused" if one.refused else "FAILED" if one.error else "DIFFERS"
    rest = one.refused or (one.error.strip().splitlines()[-1] if one.error else one.parts)
    if one.causes:
        rest = f"{rest}; {one.causes[0]}"
    return f"{word:<8} {one.max_rel_diff:<8.1e} {one.seconds:>5.1f} s  {one.plan or 'one rank'}  {rest}".rstrip()
