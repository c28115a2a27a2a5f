"""Query to the planner: a model, a cluster, a batch, and the plan fields that the user fixed."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.config.cluster import ClusterSpec, DeviceSpec, device_by_torch_name
from weft.config.fields.layout import common_divisors
from weft.config.fields.plan_text import split_plan
from weft.config.partitioning import bucket_bytes
from weft.config.plan import AXES, PLAN_FIELDS, Plan
from weft.config.rules.plan_rules import LASTING, LIMIT_RULES, ORDER_RULES, RULES
from weft.config.rules.rule import Facts, Rule
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.config.shapes.model_spec import ModelSpec
from weft.config.shapes.traced_model import TracedModel
from weft.errors import ConfigError, PlanError, Problem, did_you_mean
from weft.planner.cost.machine import Tables
from weft.planner.measured import profile_tables
from weft.planner.measured.machine_profile import Profile, load_profile
from weft.planner.search.model_source import PlannedModel, default_batch, default_seq_len, read_model
from weft.planner.search.plan_rows import Verdicts
from weft.planner.space.columns import Job
from weft.planner.space.enumerate import Space
from weft.planner.space.shape import Shape, Stack
from weft.planner.space.trained_part import PrivateDraws
from weft.units import counted

#: Minimum probability of fitting into memory for plans that are listed.
FITS = 0.9
#: Example values for error messages.
_USUAL = {"seq-len": 8192, "global-batch": 128}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Query to the planner.

    Attributes:
        fixed: values of plan fields that the user fixed.
        built_only: search only plans that the runtime supports.
        tier: "datasheet" or "tables".
        fits: minimum probability of fitting into memory.
        most_plans: a space with more plans is narrowed before the search, and the answer describes it. The default is a
            million, and 160,000 for up to 64 devices.
        refine_s: time (s) for annealing after enumeration.
        profile: profile of a measured machine.
        assumed: descriptions of defaults that were filled in.
        verdicts: cached results of plan rules.
        space: the full search space.
    """

    model: PlannedModel
    cluster: ClusterSpec
    job: Job
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    built_only: bool = True
    tier: str = "tables"
    fits: float = FITS
    most_plans: int | None = None
    refine_s: float = 0.0
    profile: Profile | None = None
    assumed: tuple[str, ...] = ()
    verdicts: Verdicts = field(init=False, repr=False, compare=False)
    space: Space = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "verdicts", Verdicts(self.rules, self.facts))
        object.__setattr__(self, "space", Space.full(self.job, self.cluster, self.fixed))

    @classmethod
    def of(
        cls,
        model: str | ModelSpec | DecoderSpec | Shape | TracedModel | PlannedModel,
        cluster: str | ClusterSpec,
        *,
        seq_len: int | None = None,
        global_batch: int | None = None,
        fixed: str | Mapping[str, Any] = "",
        profile: Path | str | None = None,
        documents: str | None = None,
        **options: Any,
    ) -> Question:
        """Return a query from names, as on the command line, with `fixed` as plan text ("tp=8 zero=1").

        Args:
            model: as in `read_model`.
            cluster, profile: as in `find_machines`.
            seq_len: tokens of a sequence; None uses the config's or a default.
            global_batch: sequences of a step; None uses the config's or a default.
            fixed: plan fields that the search must not change, as plan text or by name.
            documents: lengths of packed documents, in the format of `DocumentMix.parse`; None if each sequence is one
                document.
            **options: other fields of `Question`.

        Raises:
            ModelError, ConfigError, PlanError: for input that cannot be read.
        """
        planned = read_model(model)
        machines, known = find_machines(cluster, profile)
        assumed = [] if planned.config else [
            name for name, value in (("seq_len", seq_len), ("global_batch", global_batch))
            if value is None and (name == "global_batch" or planned.reads_sequence)
        ]  # fmt: skip
        if seq_len not in (None, 1) and not planned.reads_sequence:
            raise _error("seq-len", f"seq-len={seq_len}: {planned.name} has no sequence dimension. Leave it out.")
        seq_len = default_seq_len(planned) if seq_len is None else _positive("seq-len", seq_len)
        global_batch = default_batch(planned, seq_len, machines.num_devices) if global_batch is None else global_batch
        if seq_len > planned.spec.max_seq_len:
            rule = f"{planned.name} reads at most {planned.spec.max_seq_len} tokens"
            raise _error("seq-len", f"seq-len={seq_len}: {rule}. Use --seq-len {planned.spec.max_seq_len} or less.")
        decided = read_fixed(fixed) if isinstance(fixed, str) else dict(fixed)
        if planned.config is not None and planned.config.privacy.is_on:
            decided = _fixed_in_private_runs(decided, machines.device)
        _expect_divisors(decided, machines.num_devices)
        _expect_measured(decided.get("precision"), known, machines.num_devices)
        words = {"seq_len": f"--seq-len {seq_len}", "global_batch": f"--global-batch {global_batch}"}
        job = _job(planned, seq_len, _positive("global-batch", global_batch), machines.device)
        return cls(
            model=planned,
            cluster=machines,
            job=_packed(job, documents, planned),
            fixed=decided,
            profile=known,
            assumed=(*(words[name] for name in assumed), *_assumed_links(machines)),
            **options,
        )

    @property
    def facts(self) -> Facts:
        """Context for plan rules."""
        return Facts(
            model=self.model.spec,
            world_size=self.cluster.num_devices,
            global_batch=self.job.global_batch,
            seq_len=self.job.seq_len,
            device=self.cluster.device,
            limits=self.model.limits,
        )

    @property
    def unit(self) -> str:
        """Unit of throughput: "tokens", or the task's name for samples if the model reads no sequences."""
        return "tokens" if self.model.reads_sequence else self.model.sample_unit

    @property
    def work(self) -> str:
        """Text that describes the data of a step."""
        if not self.model.reads_sequence:
            return f"{self.job.global_batch} {self.unit} a step"
        job, name = self.job, self.model.sample_unit
        name = "sequences" if name == "samples" else name
        several = f"{job.texts} texts of " if job.texts > 1 else ""
        packed = f", {job.documents}" if job.documents else ""
        drawn = f", memory for up to {job.private.most}" if job.private else ""
        return f"{job.global_batch} {name} of {several}{job.seq_len} tokens a step{packed}{drawn}"

    @property
    def limit(self) -> int:
        """Maximum number of plans to estimate."""
        return self.most_plans or (160_000 if self.cluster.num_devices <= 64 else 1_000_000)

    @property
    def rules(self) -> list[Rule]:
        """The rules that plans must satisfy."""
        return list(RULES if self.built_only else LASTING)

    @property
    def pruning_rules(self) -> list[Rule]:
        """Rules that an enumerated plan can break.

        These plans have the default axis order unless `fixed` has another one.
        """
        never = () if self.model.limits else LIMIT_RULES
        never = (*never, *(() if "order" in self.fixed else ORDER_RULES))
        return [rule for rule in self.rules if not any(rule is each for each in never)]

    @property
    def tables(self) -> Tables:
        """Constants of the cost model for the device."""
        return _tables(self.profile, self.cluster, self.tier)


def _assumed_links(cluster: ClusterSpec) -> list[str]:
    device, tables = cluster.device, _tables(None, cluster, "tables")
    node = min(device.scale_up_domain, cluster.devices_per_node)
    needs_links = node > 1 and not device.scale_up_bytes_per_s
    needs_network = cluster.num_devices > node and device.nic_bytes_per_s is None
    return [f"link={tables.link_rate / 1e9:g}GB/s"] * needs_links + [
        f"nic={tables.nic_rate / 1e9:g}GB/s"
    ] * needs_network


def _job(planned: PlannedModel, seq_len: int, global_batch: int, device: DeviceSpec) -> Job:
    """Return the job, which is the same for all plans. For Weft's decoders, groups with lr=0 are frozen."""
    config = planned.config
    states = "fp32" if config is None else config.optimizer.states
    by_row = config is None or config.train.fp8_recipe == "rowwise"
    stack = Stack(half_wgrad=True, half_experts=True, row_scales=by_row)
    if device.is_cpu:
        stack = replace(stack, bucket_params=bucket_bytes("cpu") // 4)
    if states != "fp32":
        stack = replace(stack, main_bytes={"bf16": 8.0, "fp8": 6.0}[states])
    job = Job(
        shape=planned.shape,
        seq_len=seq_len,
        global_batch=global_batch,
        optimizer=config.optimizer.name if config else "adamw",
        stack=stack,
        adapter=planned.adapter,
        texts=planned.texts,
        frozen=planned.frozen,
    )
    if config is not None and config.privacy.is_on:
        job = replace(job, private=PrivateDraws.of(config.privacy, global_batch, config.train.steps))
    if config is None or planned.traced is not None:
        return job
    job = job.with_half_layers(planned.spec, config.train.bf16_layers)
    return job.with_groups(planned.spec, config.optimizer.groups)


def _packed(job: Job, text: str | None, planned: PlannedModel) -> Job:
    """Return the job with sequences of packed documents.

    Raises:
        ConfigError: for an invalid text, or a model that does not support it.
    """
    if text is None:
        return job
    if not planned.reads_sequence:
        raise _error("documents", f"documents={text}: {planned.name} has no sequence dimension. Leave it out.")
    traced = planned.traced
    if traced is not None and not any(each.causal for layer in traced.layers for each in layer.attentions):
        raise _error("documents", f"documents={text}: {planned.name} has no causal attention. Leave it out.")
    return job.with_documents(text)


@functools.lru_cache(maxsize=8)
def _tables(profile: Profile | None, cluster: ClusterSpec, tier: str) -> Tables:
    """Return the constants of the cost model. Cached, because it is fitted to the measurements of a profile."""
    return (
        Tables.of(cluster.device, tier) if profile is None else profile_tables.measured_tables(profile, cluster, tier)
    )


def find_machines(cluster: str | ClusterSpec, profile: Path | str | None = None) -> tuple[ClusterSpec, Profile | None]:
    """Return the cluster, and its profile or None.

    Args:
        cluster: "here" or "4xhere" for this machine, a profile's file (.json), or as in `read_cluster`.
        profile: file of the profile. None reads the default file if the cluster is this machine. Ignored if the cluster
            is a profile's file.

    Raises:
        ConfigError: for unreadable input, a profile of another device than the cluster's, or, if the cluster is this
            machine, no profile or one that is no longer valid.
    """
    path = Path(profile) if profile is not None else None
    if isinstance(cluster, str) and profile_tables.is_this_machine(cluster):
        found = profile_tables.local_profile(path)
        return profile_tables.cluster_of(found, cluster), found
    if isinstance(cluster, str) and Path(cluster).suffix == ".json":
        found = load_profile(cluster)
        return profile_tables.cluster_of(found), found
    machines = read_cluster(cluster)
    if path is None:
        return machines, None
    found = load_profile(path)
    known = device_by_torch_name(found.machine.device)
    if known is None or known.name != machines.device.name.rstrip("*"):
        rule = f"it was measured on {found.machine.device}, and the cluster has {machines.device.name}"
        raise _error("profile", f"profile={path}: {rule}. Use it with CLUSTER=here, or leave it out.")
    return machines, found


def read_cluster(source: str | ClusterSpec) -> ClusterSpec:
    """Read a cluster from a shorthand ("2x8xh100") or a .toml file.

    Raises:
        ConfigError: for a text or file that cannot be read.
    """
    if isinstance(source, ClusterSpec):
        return source
    return ClusterSpec.load(source) if Path(source).suffix == ".toml" else ClusterSpec.parse(source)


def read_fixed(text: str) -> dict[str, Any]:
    """Parse the fixed fields from a plan's text. The value "auto" fixes nothing.

    Raises:
        PlanError: for a text that is not a plan.
    """
    words, problems = split_plan(text)
    if problems:
        raise PlanError(problems)
    plan = Plan.from_mapping(words)
    values = {name: getattr(plan, name) for name in words}
    return {name: value for name, value in values.items() if not value or value != PLAN_FIELDS[name].auto_value}


def _fixed_in_private_runs(decided: Mapping[str, Any], device: DeviceSpec) -> dict[str, Any]:
    """Return `decided` with the fields that privacy fixes. Raises PlanError for untested values."""
    # Here, because pydantic takes as long to import as a simple question takes to answer.
    from weft.config.rules.privacy_rules import fixed_by_privacy, private_plan_problems

    found = {**fixed_by_privacy(), **({} if device.is_cpu else {"precision": "bf16"}), **decided}
    if refused := private_plan_problems(Plan().replace(**found)):
        raise PlanError(refused)
    return found


def _expect_divisors(decided: Mapping[str, Any], num_devices: int) -> None:
    sizes = {axis: decided[axis] for axis in AXES if isinstance(decided.get(axis), int)}
    needed = math.prod(sizes.values())
    if needed and num_devices % needed:
        words = " ".join(f"{axis}={size}" for axis, size in sizes.items())
        rule = f"{counted(num_devices, 'device')} are no multiple of {needed}"
        raise _error(
            "fix", f"fix={words}: {rule}. Use a divisor: {', '.join(map(str, common_divisors(num_devices)[:12]))}."
        )


def _expect_measured(precision: str | None, profile: Profile | None, num_ranks: int) -> None:
    if profile is None or profile.machine.kind != "cpu" or precision not in ("bf16", "fp16", "fp8"):
        return
    if "bf16" not in profile.formats(num_ranks):  # bf16 represents all narrow formats
        rule = f"not measured with {counted(num_ranks, 'rank')} on this machine"
        remedy = "Measure it, with more time: weft calibrate --budget 5m"
        raise _error("precision", f"precision={precision}: {rule}. {remedy}.")


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not 1 <= value <= 10**9:
        raise _error(
            name, f"{name}={value}: a whole number from 1 to 10**9 is needed. Use e.g. --{name} {_USUAL[name]}."
        )
    return value


def _error(field: str, message: str) -> ConfigError:
    return ConfigError([Problem(field, message)])


# Fine-tuning: all weights or an adapter.

#: Default rank of an adapter, and default sequence length and batch: fine-tuning reads little data per step.
RANK, SEQ_LEN, BATCH = 16, 2048, 16
TUNES = ("full", "lora", "qlora")
#: Storage of frozen weights with `--tune qlora`.
PACKED = {"qlora": "nf4"}


def tuned_question(model: str | PlannedModel | Any, cluster: str, tune: str, **options: Any) -> Question:
    """Return the query for fine-tuning a model.

    Args:
        tune: "full", "lora", "qlora" (base in nf4), or "lora=64" for a rank other than 16.
        **options: options of `Question.of`. The defaults of seq_len and global_batch are 2048 and 16, unless a config
            sets them.

    Raises:
        ConfigError: for any other value of `tune`, an adapter for a model without linear layers, and as in
            `Question.of`.
        ModelError, PlanError: as in `Question.of`.
    """
    planned = read_model(model)
    rank = _rank(tune)
    if rank and planned.traced is not None and not planned.traced.linears:
        raise _wrong(tune, f"{planned.name} has no linear layer that an adapter fits", "full")
    assumed = list[str]()
    if planned.config is None and planned.reads_sequence:
        for name, usual in (("seq_len", min(SEQ_LEN, planned.spec.max_seq_len)), ("global_batch", BATCH)):
            if options.get(name) is None:
                options[name] = usual
                assumed.append(f"--{name.replace('_', '-')} {usual}")
    asked = Question.of(planned, cluster, **options)
    adapter = planned.adapter_of(rank, PACKED.get(tune.partition("=")[0], "stored")) if rank else None
    return replace(asked, job=replace(asked.job, adapter=adapter), assumed=(*assumed, *asked.assumed))


def _rank(tune: str) -> int:
    kind, equals, number = tune.partition("=")
    if kind not in TUNES or (equals and kind == "full"):
        rule = f"it is full, lora, lora=RANK, qlora, qlora=RANK or all.{did_you_mean(kind, TUNES)}"
        raise _wrong(tune, rule, "lora", is_ended=True)
    if not equals:
        return 0 if kind == "full" else RANK
    if not number.isdecimal() or not 1 <= int(number) <= 65536:
        raise _wrong(tune, "an adapter's rank is a whole number from 1 to 65536", "lora=64")
    return int(number)


def _wrong(tune: str, rule: str, remedy: str, *, is_ended: bool = False) -> ConfigError:
    end = "" if is_ended else "."
    return ConfigError([Problem("", f"tune={tune}: {rule}{end} Use --tune {remedy}.")])
