"""Input of the planner: a model, a cluster, a batch, and the fields that the user decided."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.config.cluster import ClusterSpec, device_by_torch_name
from weft.config.decoder_shape import DecoderSpec
from weft.config.layout import common_divisors
from weft.config.model_spec import ModelSpec
from weft.config.plan import AXES, PLAN_FIELDS, Plan
from weft.config.plan_text import split_plan
from weft.config.rules.plan_rules import LASTING, LIMIT_RULES, ORDER_RULES, RULES
from weft.config.rules.rule import Facts, Rule
from weft.config.traced_model import TracedModel
from weft.errors import ConfigError, PlanError, Problem
from weft.planner.cost.machine import Tables
from weft.planner.measured import profile_tables
from weft.planner.measured.machine_profile import Profile, load_profile
from weft.planner.search.model_source import PlannedModel, default_batch, default_seq_len, read_model
from weft.planner.search.verdicts import Verdicts
from weft.planner.space.columns import Job
from weft.planner.space.enumerate import Space
from weft.planner.space.shape import Shape, Stack
from weft.units import counted

#: Minimum probability of fitting into memory for a listed plan.
FITS = 0.9
#: Example values for error messages.
_USUAL = {"seq-len": 8192, "global-batch": 128}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Question to the planner.

    Attributes:
        fixed: plan fields with decided values.
        built_only: search only plans that the runtime supports.
        tier: "datasheet" or "tables".
        fits: minimum probability of fitting into memory.
        most_plans: a space with more plans is narrowed before the search, and the answer describes it. The default is a
            million, and 160,000 for up to 64 devices.
        refine_s: seconds for annealing after enumeration.
        profile: profile of a measured machine.
        assumed: descriptions of defaults that were filled in.
        verdicts: cached verdicts of plan rules.
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
        """Return a question from names, as on the command line, with `fixed` as plan text ("tp=8 zero=1").

        Args:
            model: a size, a path, or a specification.
            cluster: "2x8xh100", a .toml file, or a ClusterSpec.
            seq_len: tokens of a sequence; None uses the config's or a default.
            global_batch: sequences of a step; None uses the config's or a default.
            fixed: decided fields, as plan text or by name.
            profile: file with the profile of a measured machine.
            documents: lengths of packed documents, in the format of `DocumentMix.parse`; None if each sequence is one
                document.
            **options: further fields of the question.

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
        _expect_divisors(decided, machines.num_devices)
        _expect_measured(decided.get("precision"), known, machines.num_devices)
        words = {"seq_len": f"--seq-len {seq_len}", "global_batch": f"--global-batch {global_batch}"}
        return cls(
            model=planned,
            cluster=machines,
            job=_packed(_job(planned, seq_len, _positive("global-batch", global_batch)), documents, planned, known),
            fixed=decided,
            profile=known,
            assumed=tuple(words[name] for name in assumed),
            **options,
        )

    @property
    def facts(self) -> Facts:
        """Facts for plan rules."""
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
        """Description of the data that a step reads."""
        if not self.model.reads_sequence:
            return f"{self.job.global_batch} {self.unit} a step"
        job, name = self.job, self.model.sample_unit
        name = "sequences" if name == "samples" else name
        several = f"{job.texts} texts of " if job.texts > 1 else ""
        packed = f", {job.documents}" if job.documents else ""
        return f"{job.global_batch} {name} of {several}{job.seq_len} tokens a step{packed}"

    @property
    def limit(self) -> int:
        """Maximum number of plans to estimate."""
        return self.most_plans or (160_000 if self.cluster.num_devices <= 64 else 1_000_000)

    @property
    def rules(self) -> list[Rule]:
        """The rules that prune."""
        return list(RULES if self.built_only else LASTING)

    @property
    def pruning_rules(self) -> list[Rule]:
        """Rules that an enumerated plan can break. It has the default order unless another one is decided."""
        never = () if self.model.limits else LIMIT_RULES
        never = (*never, *(() if "order" in self.fixed else ORDER_RULES))
        return [rule for rule in self.rules if not any(rule is each for each in never)]

    @property
    def tables(self) -> Tables:
        """Constants of the cost model for the device."""
        return _tables(self.profile, self.cluster, self.tier)


def _job(planned: PlannedModel, seq_len: int, global_batch: int) -> Job:
    """Return the job, which no plan changes. For Weft's decoders, groups with lr=0 are frozen."""
    job = Job(
        shape=planned.shape,
        seq_len=seq_len,
        global_batch=global_batch,
        optimizer=planned.config.optimizer.name if planned.config else "adamw",
        stack=_stack(planned),
        adapter=planned.adapter,
        texts=planned.texts,
        frozen=planned.frozen,
    )
    if planned.config is None or planned.traced is not None:
        return job
    job = job.with_half_layers(planned.spec, planned.config.train.bf16_layers)
    return job.with_groups(planned.spec, planned.config.optimizer.groups)


def _packed(job: Job, text: str | None, planned: PlannedModel, profile: Profile | None) -> Job:
    """Return the job with sequences of packed documents.

    Raises:
        ConfigError: for an invalid text, or a model or profile that does not support it.
    """
    if text is None:
        return job
    if not planned.reads_sequence:
        raise _error("documents", f"documents={text}: {planned.name} has no sequence dimension. Leave it out.")
    traced = planned.traced
    if traced is not None and not any(each.causal for layer in traced.layers for each in layer.attentions):
        raise _error("documents", f"documents={text}: {planned.name} has no causal attention. Leave it out.")
    if profile is not None and profile.machine.kind == "cpu":
        raise _error("documents", f"documents={text}: a measured host supports only full sequences. Leave it out.")
    return job.with_documents(text)


def _stack(planned: PlannedModel) -> Stack:
    """Return Weft's software stack, with the config's optimizer state format and float8 scales."""
    config = planned.config
    states = "fp32" if config is None else config.optimizer.states
    by_row = config is None or config.train.fp8_recipe == "rowwise"
    weft = Stack(half_wgrad=True, half_experts=True, row_scales=by_row)
    return weft if states == "fp32" else replace(weft, main_bytes={"bf16": 8.0, "fp8": 6.0}[states])


@functools.lru_cache(maxsize=8)
def _tables(profile: Profile | None, cluster: ClusterSpec, tier: str) -> Tables:
    """Return the constants of the cost model. Cached, because laws are fitted to the samples of a profile."""
    return (
        Tables.of(cluster.device, tier) if profile is None else profile_tables.measured_tables(profile, cluster, tier)
    )


def find_machines(cluster: str | ClusterSpec, profile: Path | str | None = None) -> tuple[ClusterSpec, Profile | None]:
    """Return the cluster and its profile. A text may be "here", "4xhere" or a profile's file.

    Raises:
        ConfigError: for a profile of another device than the cluster's.
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
    """Read the decided fields from a plan's text. The value "auto" decides nothing.

    Raises:
        PlanError: for a text that is not a plan.
    """
    words, problems = split_plan(text)
    if problems:
        raise PlanError(problems)
    plan = Plan.from_mapping(words)
    values = {name: getattr(plan, name) for name in words}
    return {name: value for name, value in values.items() if not value or value != PLAN_FIELDS[name].auto_value}


def _expect_divisors(decided: Mapping[str, Any], num_devices: int) -> None:
    """Raise ConfigError if the decided axis sizes do not divide the number of devices."""
    sizes = {axis: decided[axis] for axis in AXES if isinstance(decided.get(axis), int)}
    needed = math.prod(sizes.values())
    if needed and num_devices % needed:
        words = " ".join(f"{axis}={size}" for axis, size in sizes.items())
        rule = f"{counted(num_devices, 'device')} are no multiple of {needed}"
        raise _error(
            "fix", f"fix={words}: {rule}. Use a divisor: {', '.join(map(str, common_divisors(num_devices)[:12]))}."
        )


def _expect_measured(precision: str | None, profile: Profile | None, num_ranks: int) -> None:
    """Raise ConfigError for a decided number format that is not in the host's profile for this number of ranks."""
    if profile is None or profile.machine.kind != "cpu" or precision not in ("bf16", "fp16", "fp8"):
        return
    if "bf16" not in profile.formats(num_ranks):  # it stands for all narrow formats
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
