"""The `weft` command: finds the subcommand, imports only its module, and prints expected errors as one sentence."""

from __future__ import annotations

import gc
import importlib
import json
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from weft.cli.console import complain, paint, print_line
from weft.errors import ConfigError, WeftError, did_you_mean


class Verb(NamedTuple):
    """Location of a subcommand: a function, or a typer.Typer with further subcommands."""

    help: str
    module: str
    attribute: str


VERBS = {
    "train": Verb("Train a model; the same command again resumes.", "weft.cli.train", "train"),
    "plan": Verb(
        "Find the best parallel plans for a model on a cluster, with reasons.", "weft.cli.planning.plan", "plan"
    ),
    "calibrate": Verb("Measure this machine for the planner.", "weft.cli.machines.calibrate", "calibrate"),
    "verify": Verb("Check that a plan computes the same numbers as one process.", "weft.cli.verify", "verify"),
    "ab": Verb("Find out which of two settings is better, by pairs of runs.", "weft.cli.ab", "ab"),
    "watch": Verb("Show runs while they train, on a page or in the terminal.", "weft.cli.watch", "watch"),
    "runs": Verb("List, show, compare and steer runs.", "weft.cli.runs", "app"),
    "generate": Verb("Continue a prompt with a trained model.", "weft.cli.inference.generate", "generate"),
    "export": Verb("Write a trained model as a folder that transformers loads.", "weft.cli.checkpoints.ckpt", "export"),
    "score": Verb("Compute log-likelihoods of texts and choices.", "weft.cli.inference.score", "score"),
    "eval": Verb("Evaluate a trained model on tasks of lm-eval.", "weft.cli.inference.eval", "evaluate"),
    "map": Verb("Call a function with each line of a file, on many workers.", "weft.cli.inference.map", "map_items"),
    "sweep": Verb("Search for good settings of a run.", "weft.cli.sweep", "sweep"),
    "federate": Verb("Simulate federated training on a pool.", "weft.cli.federated.verbs", "federate"),
    "privacy": Verb("Plan, report and audit private runs.", "weft.cli.privacy.verbs", "app"),
    "config": Verb("Show, check and explain configs.", "weft.cli.config", "app"),
    "data": Verb("Inspect and prepare training data.", "weft.cli.data", "app"),
    "ckpt": Verb("List, check, compare, import and delete checkpoints.", "weft.cli.checkpoints.ckpt", "app"),
    "alerts": Verb("Try alerts on a run's events; list metrics and alerts.", "weft.cli.watch", "app"),
    "launch": Verb("Print a job script that runs a config on several machines.", "weft.cli.launch.jobs", "launch"),
    "drill": Verb("Inject faults into a run of a config, one by one, on this machine.", "weft.cli.drill", "drill"),
    "models": Verb("List the built-in model sizes.", "weft.cli.models", "list_models"),
    "layout": Verb("Print how tensor parallelism splits a model, and why.", "weft.cli.models", "layout"),
    "energy": Verb("Show the energy of runs; tune power limits and clocks.", "weft.cli.machines.energy", "app"),
    "doctor": Verb("Check this machine and print a report for bug reports.", "weft.cli.machines.doctor", "doctor"),
    "version": Verb("Print Weft's version.", "weft.cli.app", "version"),
}

# Older versions of typer depend on click, newer versions include it. The base classes of BadParameter work with both.
_UsageError: Any = typer.BadParameter.__mro__[1]
_ClickException: Any = typer.BadParameter.__mro__[2]


class LazyGroup(TyperGroup):
    """Command group that imports a subcommand's module only when it runs. Listing the subcommands imports nothing."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | None:
        """Return a placeholder for the list of subcommands, or None if there is no such command.

        `resolve_command` returns the real command.
        """
        return TyperCommand(cmd_name, help=VERBS[cmd_name].help) if cmd_name in VERBS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str, Any, list[str]]:
        name, rest = args[0], args[1:]
        if name not in VERBS:
            hint = did_you_mean(name, VERBS) or f" Known: {', '.join(VERBS)}."
            raise _UsageError(f"unknown command {name!r}.{hint}", ctx=ctx)
        return name, _load(name), rest


app = typer.Typer(
    cls=LazyGroup,
    help="Train PyTorch models on one device or on a cluster, under one plan.",
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root() -> None:
    """Train PyTorch models on one device or on a cluster, under one plan."""


def version() -> None:
    """Print Weft's version."""
    import weft

    print(weft.__version__)


def run(args: Sequence[str]) -> int:
    """Run one command line and return its exit code. Expected errors are printed on stderr, others are raised."""
    args = list(args) or ["--help"]
    if args == ["--version"]:
        args = ["version"]
    if args[0] == "ab":  # the parser of options drops the first "--"
        args = ["::" if word == "--" else word for word in args]
    try:
        args = _current_form(args)
        code = _command(app)(args=args, prog_name="weft", standalone_mode=False)
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.ctx.get_help())
            return 0
        text = _usage_text(error)
        if "--json" in args:  # no subcommand has started, so none prints the error as JSON
            names = getattr(getattr(error, "param", None), "opts", None) or [getattr(error, "option_name", None) or ""]
            option = max(names, key=len).lstrip("-")
            print(json.dumps({"errors": [{"field": option, "message": text.partition("\n")[0]}]}, indent=2))
        complain(text)
        return 2
    except _ClickException as error:
        complain(error.format_message())
        return int(error.exit_code)
    except WeftError as error:
        show_error(error)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise  # otherwise; click exits with 1 for a broken pipe
        # The reader, such as `head`, has closed the pipe. Discard all further output, including that at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    if code == 130:
        print_line("interrupted.")
    return code if isinstance(code, int) else 0


# Old commands, which the next release removes.

_MOVED = {
    "send": "runs send",
    "resume": "runs resume",
    "explain": "runs explain",
    "resume-diff": "runs compare",
    "top": "watch --terminal",
    "ckpt ls": "ckpt list",
    "ckpt export": "export",
    "ask checkpoint": "runs save",
    "ask hold": "runs pause",
    "ask stop": "runs stop",
    "ask lower_lr": "runs lower-lr",
    "ask skip_data": "runs rollback --skip-data",
    "ask roll_back": "runs rollback",
}
_ASK_ACTIONS = [name[4:] for name in _MOVED if name.startswith("ask ")]
_ASK_OPTIONS = ("--why", "--factor", "--since")


def _current_form(args: list[str]) -> list[str]:
    """Return the command line with old commands replaced by new ones, and print the replacement on stderr.

    Raises:
        ConfigError: for an unknown action of `weft ask`.
    """
    old, rest = args[0], args[1:]
    if old == "ask":
        at = [n for n, word in enumerate(rest) if word[:1] != "-" and (n == 0 or rest[n - 1] not in _ASK_OPTIONS)]
        action = rest.pop(at[1]) if len(at) > 1 else ""
        if action not in _ASK_ACTIONS:
            hint = did_you_mean(action, _ASK_ACTIONS)
            raise ConfigError(f"action={action}: a run cannot do this.{hint} Use one of {', '.join(_ASK_ACTIONS)}.")
        old = f"ask {action}"
    elif " ".join(args[:2]) in _MOVED:
        old, rest = " ".join(args[:2]), args[2:]
    new = _MOVED.get(old)
    if old == "goodput" or (old == "top" and "--once" in rest):
        is_run = any(os.path.isfile(os.path.join(word, "events.jsonl")) for word in rest)
        new, rest = f"runs {'show' if is_run else 'list'}", [word for word in rest if word != "--once"]
    if new is None:
        return args
    now = [*new.split(), *rest]
    print_line(f"weft {old} goes in the next release. Use: weft {shlex.join(now)}")
    return now


def main() -> None:
    """Run the `weft` command."""
    code = run(sys.argv[1:])
    gc.freeze()  # saves a second of garbage collection of torch's objects at exit
    sys.exit(code)


def show_error(error: WeftError) -> None:
    """Print an expected error, one line per problem.

    For a failed rank, also print its traceback and the path of its output.
    """
    from weft.cli.launch.launch import RankFailed, Stopped  # imported late, for fast commands without ranks

    if isinstance(error, Stopped):
        print_line(str(error))
    elif isinstance(error, ConfigError):
        for problem in error.problems:
            complain(str(problem))
    elif isinstance(error, RankFailed):
        if error.traceback:
            print(error.traceback.rstrip(), file=sys.stderr)
        complain(str(error))
        print(paint(f"  ({error.whereabouts})", "faint", sys.stderr), file=sys.stderr, flush=True)
    else:
        complain(str(error))


def _load(name: str) -> Any:
    verb = VERBS[name]
    target = getattr(importlib.import_module(verb.module), verb.attribute)
    if not isinstance(target, typer.Typer):
        single = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
        single.command(name)(target)
        target = single
    return _command(target, name)


def _command(group: typer.Typer, name: str | None = None) -> Any:
    """Return the click command of a typer app. Boxes and colours appear only on a terminal."""
    group.rich_markup_mode = "rich" if sys.stdout.isatty() else None
    command: Any = typer.main.get_command(group)
    if name is not None:
        command.name = name
    all_of = command.get_params

    def get_params(context: Any) -> list[Any]:
        return [_without_conversion(each) for each in all_of(context)]

    command.get_params = get_params
    return command


def _without_conversion(parameter: Any) -> Any:
    """Return the parameter, changed so that it does not convert values that need no conversion.

    Newer versions of typer convert every value, including defaults, with a pydantic adapter. Importing pydantic and
    making the adapters took a tenth of a second of every command.
    """
    convert, finish = parameter.process_value, parameter.callback
    described: Any = getattr(parameter, "type_descriptor", None)
    is_listed = getattr(parameter, "multiple", False) or parameter.nargs == -1

    def process_value(context: Any, value: Any) -> Any:
        if not _is_ready(parameter, context, value, described.annotation):
            return convert(context, value)
        value = () if value is None and is_listed else value
        return value if finish is None else finish(context, parameter, value)

    if described is not None and not parameter.required and "process_value" not in vars(parameter):
        parameter.process_value = process_value
    return parameter


def _is_ready(parameter: Any, context: Any, value: Any, kind: Any) -> bool:
    """Return True if a value needs no conversion: None, a default, or text for a text parameter."""
    if value is None:
        return True
    if parameter.nargs != 1 or getattr(parameter, "multiple", False):
        return False
    source = context.get_parameter_source(parameter.name)
    is_default = getattr(source, "name", "") == "DEFAULT" and isinstance(value, bool | int | float | str)
    return is_default or (kind is str and isinstance(value, str))


#: Settings of the same last name that an error message lists.
_MOST_SETTINGS = 3
#: Options that users try with `weft plan`, and the settings to write instead.
_WORDS_OF_PLAN = {
    "--budget": "Write --run budget=5000usd.",
    "--tokens": "Write --run tokens=1T.",
    "--loss": "Write --run loss=2.2.",
    "--clusters": "Name them in CLUSTER, with commas between them.",
    "--cluster": "Write it after MODEL: weft plan llama3-8b 8xh100.",
    "--batch": "Write --global-batch.",
    "--lora": "Write --tune lora.",
    "--qlora": "Write --tune qlora.",
    "--score": "Run this in a checkout of Weft: python tools/planner/score.py FILES [--json].",
    "--experience": "Run this in a checkout of Weft: python tools/planner/score.py FILES --experience FILE.toml.",
}


def _usage_text(error: Any) -> str:
    text = str(error.format_message())
    option = getattr(error, "option_name", None)
    context = error.ctx
    if type(error).__name__ == "NoSuchOption" and option and context is not None:
        known = {flag for parameter in context.command.get_params(context) for flag in parameter.opts}
        text = f"unknown option {option!r}.{did_you_mean(option, known - {'--help'})}"
        if option in _WORDS_OF_PLAN and context.command.name == "plan":
            text = f"unknown option {option!r}. {_WORDS_OF_PLAN[option]}"
        if context.command.name == "train":
            text += f" Write settings without dashes: {_as_settings(option)}"
    path = context.command_path if context is not None else "weft"
    return f"{text.rstrip()}\n  Run `{path} --help` for usage."


def _as_settings(option: str) -> str:
    """Return the settings that end in an option's name: '--lr' -> 'optimizer.lr=... or tables.lr=...'."""
    from weft.config.run_config import RunConfig

    name = option.lstrip("-").replace("-", "_")
    tables = {
        section: getattr(field.annotation, "model_fields", {}) for section, field in RunConfig.model_fields.items()
    }
    fits = [f"{section}.{name}" for section, keys in tables.items() if name in keys]
    return "=... or ".join(fits if 0 < len(fits) <= _MOST_SETTINGS else [name]) + "=..."
