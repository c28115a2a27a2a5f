"""Rules between the keys of one config, and the plan rules applied to a config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from weft.config.cluster import DeviceSpec
from weft.config.fields.layout import Layout
from weft.config.fields.plan_text import is_auto
from weft.config.parsing import origin_of, shown
from weft.config.plan import Plan, plan_fields
from weft.config.rules.config_rule import ConfigRule, plan_of
from weft.config.rules.engine_rules import JAX_RULES
from weft.config.rules.evaluation_rules import EVALUATION_RULES
from weft.config.rules.monitor_rules import energy_problems, watch_problems
from weft.config.rules.optimizer_rules import OPTIMIZER_RULES
from weft.config.rules.plan_rules import check
from weft.config.rules.privacy_rules import PRIVACY_RULES
from weft.config.rules.rule import Facts
from weft.config.rules.share_config_rules import SHARE_CONFIG_RULES
from weft.config.rules.table_rules import TABLE_RULES
from weft.config.rules.technique_rules import keeps_residual
from weft.config.run_config import RunConfig
from weft.config.sections import TRAINS, AdapterSection
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.config.shapes.model_spec import resolve_decoder
from weft.devices.kinds import KINDS, obstacle
from weft.errors import ConfigError, LayoutError, PlanError, Problem

# Rules for configs whose replicas are separate process groups (`launch.replicas_apart`).

_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")


def _device_obstacle(config: RunConfig) -> str:
    """Return the reason why the kind of device in launch.device cannot run the plan, or ""."""
    kind, found = KINDS.get(config.launch.device), plan_of(config)
    if kind is None or found is None or config.launch.engine != "torch":
        return ""
    plan = found[0]
    return obstacle(kind, plan.precision, graphs=plan.graphs, compiled=plan.compile)


APART_RULES: tuple[ConfigRule, ...] = (
    ConfigRule(
        name="separate-replicas-need-sync",
        keys=("launch.replicas_apart", "plan"),
        reason="Only replicas that synchronize every H steps can be separate, so the plan needs sync=diloco:H.",
        predicate=lambda config: (
            config.launch.replicas_apart
            and (found := plan_of(config)) is not None
            and (found[0].sync == "step" or (found[0].dp_replicate == 1 and found[1] != "dp_replicate"))
        ),
        message=lambda config: (
            f"true: the plan {config.plan!r} has no replicas that synchronize every H steps. Use e.g. dp_replicate=2 "
            "sync=diloco:50 in the plan, or leave launch.replicas_apart out."
        ),
    ),
    ConfigRule(
        name="separate-replicas-without-fragments",
        keys=("launch.replicas_apart", "plan"),
        reason="Separate replicas synchronize the full model together, so they cannot stream fragments.",
        predicate=lambda config: (
            config.launch.replicas_apart and (found := plan_of(config)) is not None and found[0].sync_fragments > 0
        ),
        message=lambda config: (
            f"true: the plan {config.plan!r} streams fragments, and separate replicas synchronize the full model "
            "together. Leave the number of fragments out of sync, or leave launch.replicas_apart out."
        ),
    ),
    ConfigRule(
        name="separate-replicas-without-feedback",
        keys=("launch.replicas_apart", "plan"),
        reason="A replica that misses a synchronization would add its error feedback to weights that have changed.",
        predicate=lambda config: (
            config.launch.replicas_apart and (found := plan_of(config)) is not None and keeps_residual(found[0])
        ),
        message=lambda config: (
            f"true: the plan {config.plan!r} adds its compression error to the next synchronization, which a separate "
            "replica may miss. Use compress=int8, which has no error feedback, or leave launch.replicas_apart out."
        ),
    ),
    ConfigRule(
        name="separate-replicas-need-a-plan",
        keys=("launch.replicas_apart", "plan"),
        reason="The planner never chooses sync, so it cannot plan separate replicas.",
        predicate=lambda config: config.launch.replicas_apart and is_auto(config.plan),
        message="true: the planner cannot plan separate replicas. Write the plan, such as "
        'plan="dp_replicate=2 dp_shard=4 zero=1 sync=diloco:50".',
    ),
    ConfigRule(
        name="separate-replicas-keep-all-ranks",
        keys=("launch.min_ranks", "launch.replicas_apart"),
        reason="A separate replica has all ranks of its plan; if it is lost, the others continue without it.",
        predicate=lambda config: config.launch.replicas_apart and config.launch.min_ranks is not None,
        message=lambda config: (
            f"{config.launch.min_ranks}: under launch.replicas_apart=true a replica has all ranks of its plan or is "
            "lost, and the others continue without it. Leave launch.min_ranks out."
        ),
    ),
    ConfigRule(
        name="replica-needs-separate-replicas",
        keys=("launch.replica", "launch.meet_at", "launch.replicas_apart"),
        reason="Only separate replicas are started one by one, and have a rendezvous address.",
        predicate=lambda config: (
            not config.launch.replicas_apart
            and (config.launch.replica is not None or config.launch.meet_at is not None)
        ),
        message=lambda config: (
            f"{'none' if config.launch.replica is None else config.launch.replica}: launch.replica and launch.meet_at "
            "are for separate replicas. Add launch.replicas_apart=true, or leave them out."
        ),
    ),
    ConfigRule(
        name="replica-needs-an-address",
        keys=("launch.replica", "launch.meet_at", "launch.replicas_apart"),
        reason="A replica that is started alone needs the rendezvous address and its number.",
        predicate=lambda config: (
            config.launch.replicas_apart and (config.launch.replica is None) != (config.launch.meet_at is None)
        ),
        message=lambda config: (
            f"none: launch.meet_at={config.launch.meet_at} is set without the number of this machine's replica. Add "
            "launch.replica=0 on the machine of that address, launch.replica=1 on the next."
            if config.launch.replica is None
            else f"{config.launch.replica}: it needs the rendezvous address. Add launch.meet_at=HOST:PORT, with the "
            "address of the machine that starts replica 0."
        ),
    ),
    ConfigRule(
        name="rendezvous-needs-a-key",
        keys=("launch.meet_at", "launch.meeting_key"),
        reason="Anyone who can reach the rendezvous address could otherwise change the model.",
        predicate=lambda config: (
            config.launch.meet_at is not None
            and config.launch.meeting_key is None
            and config.launch.meet_at.rpartition(":")[0] not in _LOOPBACK
        ),
        message=lambda config: (
            f"{config.launch.meet_at}: other machines can reach this address, so replicas must authenticate. Put the "
            "same secret into WEFT_MEETING_KEY on all machines, and add launch.meeting_key=env:WEFT_MEETING_KEY."
        ),
    ),
    ConfigRule(
        name="replica-is-in-the-plan",
        keys=("launch.replica", "plan"),
        reason="Replicas are counted from 0 to dp_replicate - 1.",
        predicate=lambda config: (
            config.launch.replica is not None
            and (found := plan_of(config)) is not None
            and found[1] is None
            and config.launch.replica >= found[0].dp_replicate
        ),
        message=lambda config: (
            f"{config.launch.replica}: the plan {config.plan!r} has replicas 0 to "
            f"{Plan.read_open(config.plan)[0].dp_replicate - 1}. Use one of these."
        ),
    ),
    ConfigRule(
        name="replica-plan-is-closed",
        keys=("launch.replica", "plan"),
        reason="Machines that each start one replica need the same plan, so it must not depend on their devices.",
        predicate=lambda config: (
            config.launch.replica is not None and (found := plan_of(config)) is not None and found[1] is not None
        ),
        message=lambda config: (
            f"{config.launch.replica}: the plan {config.plan!r} has an axis '*', and this machine has only one "
            "replica. Write the number of ranks instead of '*'."
        ),
    ),
)


def _layout_problem(config: RunConfig) -> str:
    """Return the reason why the layout cannot be read, or ""."""
    try:
        Layout.read(config.layout or "x=replicate")
    except LayoutError as error:
        return str(error).removeprefix(f"layout={config.layout}: ")
    return ""


def _set_by_model_path(config: RunConfig) -> list[str]:
    """Return the settings that differ from their defaults although the folder of model.path decides them."""
    usual = RunConfig()
    free = ("model.path", "model.balance", "model.balance_rate", "model.vocab_size", "tokenizer.add_tokens")
    tables = (("model", config.model, usual.model), ("tokenizer", config.tokenizer, usual.tokenizer))
    changed = [
        f"{key}.{name}" for key, table, default in tables for name, value in table if value != getattr(default, name)
    ]
    return [key for key in changed if key not in free]


def _added_tokens_problem(config: RunConfig) -> str:
    tokens = config.tokenizer.add_tokens
    if len(tokens) > 100_000:
        return f"{len(tokens)} tokens: at most 100000 are added. Train a tokenizer instead (tokenizer.kind=bpe)."
    if "" in tokens:
        return '"": a token has at least one character. Leave the empty one out.'
    if len(set(tokens)) < len(tokens):
        return f"{Counter(tokens).most_common(1)[0][0]}: the token is listed twice. List each token once."
    if tokens and config.tokenizer.kind == "bytes" and not config.model.path:
        return f"{tokens[0]}: tokenizer.kind=bytes has one token per byte. Use tokenizer.kind=bpe or file."
    return ""


def _is_on_text(config: RunConfig) -> bool:
    """Return True if the run trains the text decoder, with any loss."""
    return config.task.name is None or TRAINS.get(config.task.name) == "decoder"


def _warmup(config: RunConfig) -> int:
    return config.schedule.warmup(config.train.steps)


def _decay(config: RunConfig) -> int:
    return config.schedule.decay(config.train.steps)


CONFIG_RULES: tuple[ConfigRule, ...] = (
    ConfigRule(
        name="task-options-are-of-a-class",
        keys=("task.options", "task.name"),
        reason="The default task, a decoder on text, uses its own sections of the config.",
        predicate=lambda config: bool(config.task.options) and config.task.name is None,
        message=lambda config: (
            f"{shown(config.task.options)}: only a task with a task.name has options. Set "
            "task.name=package.module:Class, or leave them out."
        ),
    ),
    ConfigRule(
        name="model-path-decides",
        keys=("model.path", "model", "tokenizer"),
        reason="The folder of a pretrained model sets its shape and its tokenizer.",
        predicate=lambda config: bool(config.model.path) and _is_on_text(config) and bool(_set_by_model_path(config)),
        message=lambda config: (
            f"{config.model.path}: the folder sets {', '.join(_set_by_model_path(config))}. Leave "
            f"{'it' if len(_set_by_model_path(config)) == 1 else 'them'} out, or leave model.path out."
        ),
    ),
    ConfigRule(
        name="task-has-its-folder",
        keys=("model.path", "task.name"),
        reason="Tasks that start from a pretrained model need its folder.",
        predicate=lambda config: TRAINS.get(config.task.name or "") == "folder" and not config.model.path,
        message=lambda config: (
            f'"": task.name={config.task.name} trains the model of a Hugging Face folder. Set model.path to the folder.'
        ),
    ),
    ConfigRule(
        name="adapter-has-a-rank",
        keys=tuple(f"adapter.{name}" for name in AdapterSection.model_fields),
        reason="Without a rank there is no adapter, and its other settings would do nothing.",
        predicate=lambda config: config.adapter.rank == 0 and config.adapter != AdapterSection(),
        message="0: there is no adapter, and other settings of [adapter] are set. Use adapter.rank=16, or leave them "
        "out.",
    ),
    ConfigRule(
        name="added-tokens-are-new",
        keys=("tokenizer.add_tokens", "tokenizer.kind"),
        reason="Each added token is a text of its own, and a tokenizer of bytes has no table to add it to.",
        predicate=lambda config: bool(_added_tokens_problem(config)),
        message=_added_tokens_problem,
    ),
    ConfigRule(
        name="packed-base-has-a-folder",
        keys=("adapter.base", "model.path"),
        reason="int8 and nf4 quantize the weights of a pretrained model, so its folder is needed.",
        predicate=lambda config: config.adapter.base != "stored" and not config.model.path,
        message=lambda config: (
            f"{config.adapter.base}: weights are quantized while a folder is read, and model.path is not set. Set "
            "model.path to a Hugging Face folder, or use adapter.base=stored."
        ),
    ),
    ConfigRule(
        name="reference-has-no-started-adapter",
        keys=("adapter.start", "task.name"),
        reason="The reference of these tasks is the model without its adapter, which is not where training starts.",
        predicate=lambda config: bool(config.adapter.start) and config.task.name in ("prefer", "grpo"),
        message=lambda config: (
            f"{config.adapter.start}: the reference of task={config.task.name} is the model without an adapter. Merge "
            "the adapter into model.path first (weft export RUN FOLDER --merge), and leave adapter.start out."
        ),
    ),
    ConfigRule(
        name="packed-base-has-no-dora",
        keys=("adapter.base", "adapter.kind"),
        reason="DoRA divides by norms of the weights, which quantized weights do not provide.",
        predicate=lambda config: config.adapter.base != "stored" and config.adapter.kind == "dora",
        message=lambda config: (
            f"{config.adapter.base}: adapter.kind=dora divides by norms of unquantized weights. Use "
            "adapter.kind=lora, or adapter.base=stored."
        ),
    ),
    ConfigRule(
        name="warmup-fits",
        keys=("schedule.warmup_steps", "train.steps"),
        reason="The warm-up must end before the run does.",
        predicate=lambda config: config.schedule.warmup(config.train.steps) > config.train.steps,
        message=lambda config: (
            f"{config.schedule.warmup_steps}: warm-up must end before train.steps={config.train.steps}. Use "
            f"schedule.warmup_steps={config.train.steps // 10}, or more steps."
        ),
    ),
    ConfigRule(
        name="one-warmup",
        keys=("schedule.warmup_ratio", "schedule.warmup_steps"),
        reason="The warm-up is a share of the steps or a number of steps.",
        predicate=lambda config: None not in (config.schedule.warmup_ratio, config.schedule.warmup_steps),
        message=lambda config: f"{config.schedule.warmup_ratio}: schedule.warmup_steps is set too. Keep one of them.",
    ),
    ConfigRule(
        name="decay-fits",
        keys=("schedule.decay_steps", "schedule.warmup_steps", "schedule.kind", "train.steps"),
        reason="Warm-up and decay must not overlap.",
        predicate=lambda config: (
            config.schedule.kind == "wsd" and _warmup(config) <= config.train.steps < _warmup(config) + _decay(config)
        ),
        message=lambda config: (
            f"{_decay(config)}: with schedule.warmup_steps={_warmup(config)} that is more than "
            f"train.steps={config.train.steps}. Use at most {config.train.steps - _warmup(config)}, "
            f"a shorter warm-up, or more steps."
        ),
    ),
    ConfigRule(
        name="decay-belongs-to-wsd",
        keys=("schedule.decay_steps", "schedule.kind"),
        reason="Only the wsd schedule has a separate decay; linear and cosine fall until the last step.",
        predicate=lambda config: config.schedule.decay_steps is not None and config.schedule.kind != "wsd",
        message=lambda config: (
            f"{config.schedule.decay_steps}: only schedule.kind=wsd has a separate decay, and schedule.kind "
            f"is {config.schedule.kind}. Leave it out, or use schedule.kind=wsd."
        ),
    ),
    ConfigRule(
        name="stream-without-epochs",
        keys=("data.stream", "train.epochs"),
        reason="The number of samples of a stream is not known before its end.",
        predicate=lambda config: config.data.stream and config.train.epochs is not None,
        message=lambda config: (
            f"true: train.epochs={config.train.epochs:g} needs the number of samples, which a stream does not have "
            "before its end. Use train.steps."
        ),
    ),
    ConfigRule(
        name="stream-of-one-source",
        keys=("data.stream", "data.train"),
        reason="A stream has one order of files.",
        predicate=lambda config: config.data.stream and len(config.data.train) > 1,
        message=lambda config: (
            f"true: data.train has {len(config.data.train)} sources, and a stream reads one. Give one folder or glob, "
            "or leave data.stream out."
        ),
    ),
    ConfigRule(
        name="tokenizer-path-given",
        keys=("tokenizer.path", "tokenizer.kind"),
        reason="A saved tokenizer needs its path.",
        predicate=lambda config: config.tokenizer.kind == "file" and not config.tokenizer.path,
        message='"": tokenizer.kind=file needs a saved tokenizer. Set tokenizer.path to a tokenizer.json or its '
        "folder.",
    ),
    ConfigRule(
        name="tokenizer-path-used",
        keys=("tokenizer.path", "tokenizer.kind"),
        reason="Only tokenizer.kind=file reads a path.",
        predicate=lambda config: config.tokenizer.kind != "file" and bool(config.tokenizer.path),
        message=lambda config: (
            f"{config.tokenizer.path!r}: tokenizer.kind={config.tokenizer.kind} does not read a file. "
            f"Use tokenizer.kind=file, or leave the path out."
        ),
    ),
    ConfigRule(
        name="layout-reads",
        keys=("layout",),
        reason="A layout is a list of pattern=style entries, or a file of them.",
        predicate=lambda config: bool(_layout_problem(config)),
        message=lambda config: f"{config.layout}: {_layout_problem(config)}",
    ),
    *OPTIMIZER_RULES,
    *TABLE_RULES,
    *PRIVACY_RULES,
    ConfigRule(
        name="measured-kernels-vary",
        keys=("train.deterministic", "kernels.convolutions"),
        reason="cuDNN's measurements may choose other algorithms in another run.",
        predicate=lambda config: config.train.deterministic and config.kernels.convolutions == "measured",
        message="true: kernels.convolutions=measured may choose other algorithms in each run. Use "
        "kernels.convolutions=guessed.",
    ),
    ConfigRule(
        name="profiled-steps-exist",
        keys=("train.profile", "train.steps"),
        reason="The profiled steps are in order, at most 50, and within the run.",
        predicate=lambda config: (
            config.train.profile is not None
            and not 0 < len(steps := config.train.profiled_steps) <= min(50, config.train.steps + 1 - steps.start)
        ),
        message=lambda config: (
            f"{config.train.profile}: 1 to 50 steps up to train.steps={config.train.steps} can be profiled. Use 10-12."
        ),
    ),
    ConfigRule(
        name="patience-needs-evaluations",
        keys=("train.early_stop.patience", "eval.every"),
        reason="Early stopping compares evaluations, so the run must evaluate before its end.",
        predicate=lambda config: config.train.early_stop.patience is not None and config.eval.every == 0,
        message=lambda config: (
            f"{config.train.early_stop.patience}: eval.every=0 evaluates only at the end. Use eval.every=50."
        ),
    ),
    ConfigRule(
        name="patience-needs-evaluation-data",
        keys=("train.early_stop.patience", "data.eval", "data.holdout"),
        reason="Early stopping compares evaluations, so they need data.",
        predicate=lambda config: (
            config.train.early_stop.patience is not None and not config.data.eval and config.data.holdout == 0
        ),
        message=lambda config: (
            f"{config.train.early_stop.patience}: there is no evaluation data (data.holdout=0 and no data.eval). "
            f"Use data.holdout=0.02, or set data.eval."
        ),
    ),
    *APART_RULES,
    *JAX_RULES,
    *EVALUATION_RULES,
    *SHARE_CONFIG_RULES,
    ConfigRule(
        name="device-runs-plan",
        keys=("launch.device", "plan"),
        reason="Kinds of devices differ in precisions, and in what torch compiles and records for them.",
        predicate=lambda config: bool(_device_obstacle(config)),
        message=lambda config: f"{config.launch.device}: {_device_obstacle(config)}",
    ),
)


def config_problems(
    config: RunConfig,
    *,
    broken: Collection[str] = (),
    origins: Mapping[str, str] | None = None,
    fallback: str = "",
    world_size: int | None = None,
    device: DeviceSpec | None = None,
) -> list[Problem]:
    """Return a problem for every rule that a config breaks.

    The rules are about keys, the model's shape, alerts, channels and sinks, and the plan.

    Args:
        config: the config, with defaults instead of rejected values.
        broken: dotted keys that have a default because their value was rejected. No rule reads them.
        origins: dotted key -> origin of its value.
        fallback: origin of values that were not set.
        world_size: the number of ranks, or None if unknown.
        device: device of the ranks, or None if unknown.
    """
    found: list[tuple[Problem, tuple[str, ...]]] = []  # each with the keys that may cause it
    for rule in CONFIG_RULES:
        problem = None if any(_touches(key, broken) for key in rule.keys) else rule.check(config)
        if problem is not None:
            found.append((problem, rule.keys))
    model = None
    if _is_on_text(config) and not config.model.path and not _touches("model", broken):
        try:
            model = resolve_decoder(config.model, 1 if _touches("tokenizer", broken) else least_vocab(config))
        except ConfigError as error:
            found += [(problem, (problem.field, "model", "tokenizer.vocab_size")) for problem in error.problems]
    if not any(_touches(key, broken) for key in ("alert", "channel", "sink", "energy")):
        listed = (*watch_problems(config), *energy_problems(config))
        found += [(problem, (problem.field,)) for problem in listed]
    for problem in _plan_problems(config, model, broken, world_size, device):
        found.append((problem, (problem.field, "plan", "model")))
    return [replace(problem, origin=origin_of(origins or {}, keys, fallback)) for problem, keys in found]


def least_vocab(config: RunConfig) -> int:
    """Return the minimum number of tokenizer entries: all entries if the tokenizer will be trained, else 1."""
    return config.tokenizer.vocab_size if config.tokenizer.kind == "bpe" else 1


def _touches(key: str, broken: Collection[str]) -> bool:
    return any(f"{other}.".startswith(f"{key}.") or f"{key}.".startswith(f"{other}.") for other in broken)


def _plan_problems(
    config: RunConfig,
    model: DecoderSpec | None,
    broken: Collection[str],
    world_size: int | None,
    device: DeviceSpec | None,
) -> list[Problem]:
    open_axis = None
    try:
        if _touches("plan", broken) or is_auto(config.plan):
            plan, world_size = Plan(), None  # one rank satisfies all plan rules; other rules are still checked
        elif world_size is None:
            plan, open_axis = Plan.read_open(config.plan)
        else:
            plan = Plan.parse(config.plan, world_size)
    except PlanError as error:
        return [in_config(problem) for problem in error.problems]
    facts = Facts(
        model=model,
        world_size=world_size,
        global_batch=None
        if _touches("plan", broken) or _touches("train.global_batch", broken)
        else config.train.global_batch,
        # The options of a user's task are unknown until its class is loaded.
        seq_len=None if not _is_on_text(config) or _touches("train.seq_len", broken) else config.train.seq_len,
        device=device,
        open_axis=open_axis,
    )
    return [in_config(Problem(violation.field, violation.message)) for violation in check(plan, facts)]


def in_config(problem: Problem) -> Problem:
    """Return the problem of a plan field as a problem of the config key: "tp" becomes "plan.tp"."""
    if "." in problem.field:
        return problem
    message = problem.message
    if message.startswith(f"{problem.field}=") and problem.field in plan_fields():
        message = f"plan.{message}"
    key = f"plan.{problem.field}" if problem.field and problem.field != "world_size" else "plan"
    return Problem(key, message, problem.origin)
