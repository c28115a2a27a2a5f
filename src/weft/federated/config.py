"""The file of a federated run: clients, rounds, server step, faults and privacy (no torch)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from weft.config.files import format_config, load_config, read_tables, validated
from weft.config.plan import Plan
from weft.config.privacy.section import BudgetSection
from weft.config.sections import Count, Fraction, NonNegative, PositiveFloat, Section
from weft.errors import ConfigError, PlanError, Problem
from weft.privacy.settings import Privacy, privacy_of


class ServerSettings(Section):
    """Step of the server."""

    method: Literal["fedavg", "fedprox", "fedadam", "median", "trimmed_mean"] = "fedavg"
    """How updates are combined."""
    lr: PositiveFloat = 1.0
    """Learning rate. 1 applies the combined update unchanged."""
    momentum: Fraction = 0.0
    """Nesterov momentum of the outer step, for other methods than fedadam."""
    beta1: Fraction = 0.9
    """Decay of fedadam's first moment (Reddi et al. 2021, arXiv 2003.00295)."""
    beta2: Fraction = 0.99
    """Decay of fedadam's second moment."""
    tau: PositiveFloat = 1e-3
    """Adaptivity of fedadam."""
    mu: NonNegative = 0.01
    """Weight of fedprox's proximal term (Li et al. 2020, arXiv 1812.06127)."""
    trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.1
    """Fraction of the clients that trimmed_mean removes at each end."""
    weights: Literal["samples", "equal"] = "samples"
    """samples: clients are weighted by their number of records."""


class FaultSettings(Section):
    """Simulated faults."""

    drop: Fraction = 0.0
    """Probability that a client of a round sends nothing."""
    straggle: Fraction = 0.0
    """Probability that a client is late."""
    late: Literal["out", "partial"] = "out"
    """out: late clients are left out; partial: they send fewer local steps."""


class FederatedFile(Section):
    """The keys of a federated run's file, which docs/how-to/federated.md describes."""

    config: str = ""
    """File of the clients' training, relative to this one."""
    settings: tuple[str, ...] = Field(default=(), strict=False, examples=[["optimizer.lr=0.1"]])
    """Settings that override the clients' config."""
    rounds: Annotated[int, Field(gt=0, le=10**6)] = 10
    """Rounds of the run."""
    clients: Annotated[int, Field(ge=0, le=10**7)] = 0
    """Number of clients; 0 with split = "column" for one client per value."""
    split: Literal["equal", "dirichlet", "column"] = "equal"
    """How records become clients."""
    alpha: PositiveFloat = 0.5
    """Evenness of the shares of each label under split = "dirichlet"."""
    column: str = ""
    """Column whose values are clients under split = "column"."""
    sampled: Count = 0
    """Clients of a round; 0 for all."""
    local_steps: Count = 0
    """Local steps of a client in a round, or `local_epochs`."""
    local_epochs: NonNegative = 0.0
    """Passes of a client over its records in a round, or `local_steps`."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of clients, faults and local steps."""
    eval_every: Count = 1
    """Rounds between evaluations of the server's weights; 0 for one at the end."""
    on: str = "local"
    """The pool of workers, as for `weft map`."""
    cores: Count = 0
    """Cores of a worker."""
    gpus: Count = 0
    """GPUs of a worker."""
    timeout: str | None = None
    """Time limit of a client's training."""
    server: ServerSettings = ServerSettings()
    faults: FaultSettings = FaultSettings()
    privacy: BudgetSection = BudgetSection()


class FederatedConfig(FederatedFile):
    """A checked federated run."""

    base: str
    """The config of the clients' training as TOML."""

    def identity(self) -> dict[str, Any]:
        """Return the values that must not change when a run continues. More rounds are allowed."""
        others = {"config", "settings", "rounds", "on", "cores", "gpus", "timeout", "eval_every"}
        return self.model_dump(mode="json", exclude=others)


#: Settings of the server that one method reads.
_OF_METHOD = {"beta1": "fedadam", "beta2": "fedadam", "tau": "fedadam", "mu": "fedprox", "trim": "trimmed_mean"}


def read_federated(path: Path, on: str | None = None) -> FederatedConfig:
    """Read and check the file of a federated run.

    Args:
        path: TOML file.
        on: address of the workers, instead of the file's.

    Raises:
        ConfigError: with every problem found.
    """
    file, problems = validated(read_tables(path, "federate"), FederatedFile)
    if not problems:
        rules = [*_contradictions(file), *_privacy_problems(file)]
        problems = [Problem(rule.partition("=")[0], rule) for rule in rules]
    if problems:
        raise ConfigError([Problem(one.field, one.message, str(path)) for one in problems])
    base = path.parent / file.config if file.config else None
    config = load_config(base, file.settings).config
    _check_base(config.plan, config.privacy.is_on, config.train.epochs)
    load_config(base, [*file.settings, f"train.steps={file.rounds}"])  # the schedule must fit the rounds
    values = {name: getattr(file, name) for name in FederatedFile.model_fields}
    return FederatedConfig(**{**values, "base": format_config(config), "on": on or file.on})


def _check_base(text: str, is_private: bool, epochs: float | None) -> None:
    if epochs is not None:
        raise ConfigError("train.epochs: the file of a federated run sets local_epochs. Leave train.epochs out.")
    if is_private:
        raise ConfigError(
            "privacy.epsilon: the clients' config protects single records of one run, and rounds protect clients. "
            "Write [privacy] into the federated file instead."
        )
    plan = Plan.parse(text, 1) if not text.startswith("auto") else None
    if plan is None:
        raise ConfigError("plan=auto: the planner plans for several ranks. Use plan=dp_replicate=1.")
    if plan.world_size != plan.dp_size or plan.zero == 3 or plan.sync != "step":
        raise ConfigError(
            f"plan={text}: clients are tested with dp_replicate, dp_shard and zero=0 to 2, without local SGD. Use a "
            "plan of these, such as plan=dp_replicate=2."
        )
    if plan.precision == "fp16":
        raise ConfigError(
            "plan.precision=fp16: its loss scale depends on earlier steps, so clients would depend on each other. Use "
            "bf16 or fp32."
        )


def _contradictions(config: FederatedFile) -> list[str]:
    """Return problems of settings that exclude or need each other."""
    found: list[str] = []
    server, typed = config.server, config.server.model_fields_set
    if (config.local_steps > 0) == (config.local_epochs > 0):
        found.append("local_steps: exactly one of local_steps and local_epochs is set. Use local_steps = 10.")
    if config.split != "column" and config.clients < 1:
        found.append(f"clients={config.clients}: split = {config.split!r} needs their number. Use clients = 20.")
    if (config.split == "column") != bool(config.column):
        found.append(f"column={config.column}: it belongs to split = 'column'. Set both, or none.")
    if config.split == "column" and config.clients:
        found.append(f"clients={config.clients}: each value of the column is a client. Leave clients out.")
    if config.clients and config.sampled > config.clients:
        found.append(f"sampled={config.sampled}: there are {config.clients} clients. Use at most that number.")
    if "alpha" in config.model_fields_set and config.split != "dirichlet":
        found.append(f"alpha={config.alpha:g}: it belongs to split = 'dirichlet'. Leave it out.")
    for key, method in _OF_METHOD.items():
        if key in typed and server.method != method:
            found.append(f"server.{key}: only method = {method!r} reads it. Leave it out.")
    if server.method == "fedadam" and "lr" not in typed:
        found.append("server.lr: fedadam's steps do not follow the size of updates, so it is required. Use lr = 0.01.")
    if server.method == "fedadam" and server.momentum:
        found.append("server.momentum: fedadam has beta1 instead. Leave momentum out.")
    return found


def _privacy_problems(config: FederatedFile) -> list[str]:
    privacy, found = config.privacy, list[str]()
    if not privacy.is_on:
        return ["privacy.epsilon: [privacy] has neither epsilon nor noise. Set epsilon = 8."] if privacy.delta else []
    if config.server.method in ("median", "trimmed_mean"):
        found.append(
            f"server.method={config.server.method}: noise is calibrated for sums of clipped updates. Use fedavg, "
            "fedprox or fedadam."
        )
    if config.server.weights != "equal":
        found.append(
            "server.weights=samples: a client with many records would exceed the clipping norm. Use weights = 'equal'."
        )
    if config.split == "column":
        return found  # the number of clients is not known yet; the run checks delta
    try:
        client_privacy(config, config.clients, "test:0")
    except PlanError as error:
        found += [problem.message for problem in error.problems]
    return found


def client_privacy(config: FederatedFile, clients: int, key: str) -> Privacy:
    """Return the settings of the account, whose records are clients and whose steps are rounds.

    Raises:
        PlanError: if they are impossible, such as delta >= 1 / clients.
    """
    return privacy_of(config.privacy, clients, config.sampled or clients, config.rounds, key)
