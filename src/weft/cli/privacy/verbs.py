"""`weft privacy plan`, `weft privacy report` and `weft privacy audit`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from weft.cli.checkpoints.ckpt import ONE_HELP, folder_of, one_of
from weft.cli.console import table
from weft.errors import ConfigError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Plan, report and audit private runs.")

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
#: Numbers that the bound does not cover, for reports.
NOT_PRIVATE = (
    "losses, gradient norms and metrics of training, which are computed from the records without noise",
    "evaluation data and its metrics",
    "the choice of settings by comparing runs on the same records",
    "the number of records",
)


@app.command()
def plan(
    epsilon: Annotated[float, typer.Option(help="Privacy budget.")],
    records: Annotated[int, typer.Option(help="Number of training records.")],
    steps: Annotated[int, typer.Option(help="Number of steps.")],
    delta: Annotated[
        float | None, typer.Option(help="Probability with which the bound may fail.", show_default="0.1 / records")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Expected records of a step.", show_default="several, to compare")
    ] = None,
    accountant: Annotated[str, typer.Option(help="prv or pld.")] = "prv",
    as_json: Json = False,
) -> None:
    """Print the noise that a budget needs, by expected batch size.

    The last column is the noise on the mean gradient in units of the clipping norm: smaller is better.
    """
    from weft.config.privacy.largest_draw import most_drawn
    from weft.privacy.settings import Privacy

    chosen = 0.1 / max(records, 1) if delta is None else delta
    sizes = (
        [batch] if batch is not None else [one for one in (64, 256, 1024, 4096, 16384) if one <= records] or [records]
    )
    rows: list[dict[str, Any]] = []
    for size in sizes:
        noise = Privacy(records, size, steps, chosen, epsilon, accountant=accountant).resolved().noise
        assert noise is not None
        most = min(records, most_drawn(size, size / records, steps))
        rows.append({"batch": size, "noise": noise, "most_drawn": most, "noise_of_mean": noise / size})
    if as_json:
        print(json.dumps({"epsilon": epsilon, "delta": chosen, "records": records, "steps": steps, "batches": rows}))
        return
    print(f"epsilon {epsilon:g}, delta {chosen:.2g}, {records:,} records, {steps:,} steps, by {accountant}")
    shown = [
        (f"{one['batch']:,}", f"{one['noise']:.3f}", f"{one['most_drawn']:,}", f"{one['noise_of_mean']:.2e}")
        for one in rows
    ]
    print("\n".join(table([("batch", "noise", "largest draw", "noise of the mean"), *shown], right=(0, 1, 2, 3))))


@app.command()
def report(run: Annotated[str, typer.Argument(metavar="RUN", help=ONE_HELP)], as_json: Json = False) -> None:
    """Print the epsilon of a run's steps by two accountants, and its parts that were not private."""
    from weft.privacy.accounting import Steps, epsilon_of

    step, account = _account(run)
    history = Steps.of_json(account["steps"])
    delta, is_test = float(account["delta"]), bool(account["is_test"])
    spent = {name: epsilon_of(history, delta, name) for name in ("prv", "pld")}
    if as_json:
        print(json.dumps({"step": step, "spent": spent, **account, "not_private": NOT_PRIVATE}))
        return
    print(f"{run}: step {step}, {sum(one.count for one in history):,} private steps")
    if is_test:
        print("NOT PRIVATE: the key is known (privacy.key=test:...), so anyone can subtract the noise")
    print(
        f"epsilon {spent['prv']:.3f} (PRV), {spent['pld']:.3f} (PLD) at delta {delta:.2g}, for one {account['unit']} "
        f"of {int(account['records']):,}"
    )
    for one in history:
        print(f"  {one.count:,} steps: noise {one.noise:.3f}, each record with probability {one.rate:.3g}")
    print("not covered by the bound:")
    for text in NOT_PRIVATE:
        print(f"  {text}")


@app.command()
def audit(run: Annotated[str, typer.Argument(metavar="RUN", help=ONE_HELP)], as_json: Json = False) -> None:
    """Compute a lower bound of the epsilon from the run's canaries. Exit code 1 if it is above the stated epsilon.

    The run needs privacy.canaries: a coin leaves out about half of these records, and the audit guesses from their
    losses which ones were trained.
    """
    import torch

    from weft.checkpoint.load import load_checkpoint
    from weft.privacy.accounting import Steps, epsilon_of
    from weft.privacy.audit import audit as bound_of
    from weft.train.folder import RunFolder
    from weft.train.privacy.canaries import canary_scores

    step, account = _account(run)
    folder = RunFolder(folder_of("RUN", run.partition("@")[0]))
    scores, canaries = canary_scores(folder, load_checkpoint(one_of(run)), torch.device("cpu"))
    found = bound_of(scores, canaries.is_in, float(account["delta"]))
    history = Steps.of_json(account["steps"])
    stated = epsilon_of(history, float(account["delta"]))
    is_above = found.epsilon > stated
    if as_json:
        print(json.dumps({"step": step, "stated": stated, "lower_bound": found.epsilon, "canaries": len(scores),
                          "guesses": found.guesses, "right": found.right, "passed": not is_above}))  # fmt: skip
    else:
        print(
            f"{run}: {found.right} of {found.guesses} guesses about {len(scores)} canaries are right: epsilon is at "
            f"least {found.epsilon:.3f} (95 %), and {stated:.3f} is stated"
        )
        if is_above:
            print("ABOVE the stated epsilon: the run is not as private as its account says. Do not publish it.")
    raise typer.Exit(1 if is_above else 0)


def _account(run: str) -> tuple[int, Mapping[str, Any]]:
    """Return the step and the account of a run's checkpoint. Raises ConfigError if the run is not private."""
    from weft.checkpoint.load import load_checkpoint

    checkpoint = load_checkpoint(one_of(run))
    account = checkpoint.state.get("privacy")
    if not isinstance(account, Mapping) or not {"steps", "delta", "unit", "records", "is_test"} <= set(account):
        raise ConfigError(f"RUN={run}: its steps were not private. Train it with privacy.epsilon=8.")
    return checkpoint.step, account
