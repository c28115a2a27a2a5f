"""The file of a federated run: clients, rounds, server step, faults and privacy (no torch)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from weft.config.files import format_config, load_config, read_tables
from weft.config.plan import Plan
from weft.errors import ConfigError, Problem, did_you_mean, shown
from weft.privacy.settings import Privacy

SPLITS = ("equal", "dirichlet", "column")
METHODS = ("fedavg", "fedprox", "fedadam", "median", "trimmed_mean")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Step of the server.

    Attributes:
        method: how updates are combined; one of METHODS.
        lr: learning rate. 1 applies the combined update unchanged.
        momentum: Nesterov momentum of the outer step, for other methods than fedadam.
        beta1, beta2, tau: decays and adaptivity of fedadam (Reddi et al. 2021, arXiv 2003.00295).
        mu: weight of fedprox's proximal term (Li et al. 2020, arXiv 1812.06127).
        trim: fraction of the clients that trimmed_mean removes at each end.
        weights: "samples" weights clients by their number of records, "equal" does not.
    """

    method: str = "fedavg"
    lr: float = 1.0
    momentum: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    mu: float = 0.01
    trim: float = 0.1
    weights: str = "samples"


@dataclass(frozen=True, slots=True)
class FaultSettings:
    """Simulated faults.

    Attributes:
        drop: probability that a client of a round sends nothing.
        straggle: probability that a client is late.
        late: "out" leaves late clients out, "partial" lets them send fewer local steps.
    """

    drop: float = 0.0
    straggle: float = 0.0
    late: str = "out"


@dataclass(frozen=True, slots=True)
class ClientPrivacy:
    """Differential privacy of clients: each update is clipped, and the server adds noise.

    Attributes: as in `weft.privacy.settings.Privacy`, with clients as records. Off without epsilon and noise.
    """

    epsilon: float | None = None
    noise: float | None = None
    delta: float = 0.0
    clip: float = 1.0
    accountant: str = "prv"
    key: str = ""

    @property
    def is_on(self) -> bool:
        """True if the run is private."""
        return self.epsilon is not None or self.noise is not None


@dataclass(frozen=True, slots=True)
class FederatedConfig:
    """A checked federated run. `docs/how-to/federated.md` describes the keys of its file.

    Attributes:
        base: the config of the clients' training as TOML.
        on, cores, gpus, timeout: the pool of workers.
        clients: number of clients; 0 with split = "column" for one client per value.
        split, alpha, column: how records become clients.
        sampled: clients of a round; 0 for all.
        local_steps, local_epochs: local training of a round. One of the two is 0.
        eval_every: rounds between evaluations of the server's weights.
    """

    base: str
    rounds: int = 10
    clients: int = 0
    split: str = "equal"
    alpha: float = 0.5
    column: str = ""
    sampled: int = 0
    local_steps: int = 0
    local_epochs: float = 0.0
    seed: int = 0
    eval_every: int = 1
    on: str = "local"
    cores: int = 0
    gpus: int = 0
    timeout: str | None = None
    server: ServerSettings = ServerSettings()
    faults: FaultSettings = FaultSettings()
    privacy: ClientPrivacy = ClientPrivacy()

    def identity(self) -> dict[str, Any]:
        """Return the values that must not change when a run continues. More rounds are allowed."""
        skipped = ("rounds", "on", "cores", "gpus", "timeout", "eval_every")
        return {key: value for key, value in asdict(self).items() if key not in skipped}

    def to_json(self) -> dict[str, Any]:
        """Return the config as JSON values."""
        return asdict(self)

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> FederatedConfig:
        """Return the config of `to_json`."""
        server, faults = ServerSettings(**values["server"]), FaultSettings(**values["faults"])
        return cls(**{**values, "server": server, "faults": faults, "privacy": ClientPrivacy(**values["privacy"])})


@dataclass(frozen=True, slots=True)
class _Rule:
    """Range of a number, both ends included unless `above` or `below`; or the choices of a text."""

    low: float = 0.0
    high: float = math.inf
    choices: Sequence[str] = ()
    excludes_low: bool = False
    excludes_high: bool = False

    def problem(self, value: Any, default: Any) -> str:
        """Return the broken rule with its remedy, or ""."""
        if self.choices:
            return "" if value in self.choices else f"it is {', '.join(self.choices)}.{_near(value, self.choices)}"
        is_low = value <= self.low if self.excludes_low else value < self.low
        is_high = value >= self.high if self.excludes_high else value > self.high
        if not (is_low or is_high or math.isnan(value)):
            return ""
        low = f"above {self.low:g}" if self.excludes_low else f"at least {self.low:g}"
        high = f" and {'below' if self.excludes_high else 'at most'} {self.high:g}" if self.high < math.inf else ""
        return f"it is {low}{high}. Use {default if default else self.low + (0.5 if self.excludes_low else 0):g}."


_POSITIVE, _SHARE = _Rule(excludes_low=True), _Rule(high=1.0, excludes_high=True)
_RULES: dict[str, _Rule] = {
    "rounds": _Rule(1, 10**6), "clients": _Rule(0, 10**7), "split": _Rule(choices=SPLITS), "alpha": _POSITIVE,
    "sampled": _Rule(0, 10**7), "local_steps": _Rule(0, 10**6), "local_epochs": _Rule(0, 10**4),
    "seed": _Rule(0, 2**31 - 1), "eval_every": _Rule(0, 10**6), "cores": _Rule(0, 10_000), "gpus": _Rule(0, 1000),
    "server.method": _Rule(choices=METHODS), "server.lr": _POSITIVE, "server.momentum": _SHARE,
    "server.beta1": _SHARE, "server.beta2": _SHARE, "server.tau": _POSITIVE, "server.mu": _Rule(),
    "server.trim": _Rule(high=0.5, excludes_high=True), "server.weights": _Rule(choices=("samples", "equal")),
    "faults.drop": _SHARE, "faults.straggle": _SHARE, "faults.late": _Rule(choices=("out", "partial")),
    "privacy.epsilon": _POSITIVE, "privacy.noise": _POSITIVE, "privacy.delta": _SHARE, "privacy.clip": _POSITIVE,
}  # fmt: skip
#: Settings of the server that one method reads.
_OF_METHOD = {"beta1": "fedadam", "beta2": "fedadam", "tau": "fedadam", "mu": "fedprox", "trim": "trimmed_mean"}
_SECTIONS = {"server": ServerSettings, "faults": FaultSettings, "privacy": ClientPrivacy}


def read_federated(path: Path, on: str | None = None) -> FederatedConfig:
    """Read and check the file of a federated run.

    Args:
        path: TOML file.
        on: address of the workers, instead of the file's.

    Raises:
        ConfigError: with every problem found.
    """
    tables, problems = read_tables(path, "federate"), list[Problem]()
    values, given = dict[str, Any](), {*tables}
    base_path, settings = tables.pop("config", ""), tables.pop("settings", [])
    if not isinstance(base_path, str) or not isinstance(settings, list):
        problems.append(Problem("config", "config: it is a file name, and settings is a list. Use settings = []."))
        base_path, settings = "", []
    for name, kind in _SECTIONS.items():
        table = tables.pop(name, {})
        if not isinstance(table, dict):
            problems.append(Problem(name, f"{name}={shown(table)}: it is a table. Write [{name}]."))
            table = {}
        given |= {f"{name}.{key}" for key in table}
        values[name] = kind(**_checked(table, kind, f"{name}.", problems))
    top = _checked(tables, FederatedConfig, "", problems, hidden=("base", *_SECTIONS))
    if problems:
        raise ConfigError([Problem(one.field, one.message, str(path)) for one in problems])
    loaded = FederatedConfig(base="", **{**top, **values, **({"on": on} if on else {})})
    if problems := [*_contradictions(loaded, given), *_privacy_problems(loaded)]:
        raise ConfigError([Problem(rule.partition("=")[0], rule, str(path)) for rule in problems])
    base, words = path.parent / base_path if base_path else None, list(map(str, settings))
    config = load_config(base, words).config
    _check_base(config.plan, config.privacy.is_on, config.train.epochs)
    config = load_config(base, [*words, f"train.steps={loaded.rounds}"]).config
    return replace(loaded, base=format_config(config))


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
    if plan.world_size != 1 or plan.sync != "step":
        raise ConfigError(
            f"plan={text}: a client trains in one worker process, without ranks or local SGD. Use a plan of one rank, "
            "such as plan=accumulation=2."
        )
    if plan.precision == "fp16":
        raise ConfigError(
            "plan.precision=fp16: its loss scale depends on earlier steps, so clients would depend on each other. Use "
            "bf16 or fp32."
        )


def _contradictions(config: FederatedConfig, given: set[str]) -> list[str]:
    """Return problems of settings that exclude or need each other."""
    found: list[str] = []
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
    if "alpha" in given and config.split != "dirichlet":
        found.append(f"alpha={config.alpha:g}: it belongs to split = 'dirichlet'. Leave it out.")
    for key, method in _OF_METHOD.items():
        if f"server.{key}" in given and config.server.method != method:
            found.append(f"server.{key}: only method = {method!r} reads it. Leave it out.")
    if config.server.method == "fedadam" and "server.lr" not in given:
        found.append("server.lr: fedadam's steps do not follow the size of updates, so it is required. Use lr = 0.01.")
    if config.server.method == "fedadam" and config.server.momentum:
        found.append("server.momentum: fedadam has beta1 instead. Leave momentum out.")
    return found


def _privacy_problems(config: FederatedConfig) -> list[str]:
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
    return found + [str(one) for one in _refused(config, config.clients)]


def _refused(config: FederatedConfig, clients: int) -> list[str]:
    try:
        client_privacy(config, clients, "test:0")
    except ConfigError as error:
        return [problem.message for problem in error.problems]
    except Exception as error:
        return str(error).splitlines()
    return []


def client_privacy(config: FederatedConfig, clients: int, key: str) -> Privacy:
    """Return the settings of the account, whose records are clients and whose steps are rounds.

    Raises:
        PlanError: if they are impossible, such as delta >= 1 / clients.
    """
    one = config.privacy
    return Privacy(
        clients, config.sampled or clients, config.rounds, one.delta, one.epsilon, one.clip, one.noise,
        accountant=one.accountant, key=key,
    )  # fmt: skip


def _checked(
    table: Mapping[str, Any], kind: type, prefix: str, problems: list[Problem], hidden: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the values of a table that fit a dataclass, and append the problems of the others."""
    known = {one.name: one for one in fields(kind) if one.name not in hidden}
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = prefix + key
        if key not in known:
            hint = did_you_mean(key, known) or f" Known: {', '.join(known)}."
            problems.append(Problem(name, f"{name}: there is no such key.{hint}"))
            continue
        is_text = "str" in str(known[key].type)
        is_whole = str(known[key].type) == "int"
        fits = isinstance(value, str) if is_text else type(value) is int or (not is_whole and type(value) is float)
        if not fits:
            wanted = "a text" if is_text else "a whole number" if is_whole else "a number"
            problems.append(Problem.of(name, shown(value), f"it is {wanted}. Leave it out for the default."))
        elif name in _RULES and (rule := _RULES[name].problem(value, known[key].default)):
            problems.append(Problem.of(name, shown(value), rule))
        else:
            found[key] = value if is_text or is_whole else float(value)
    return found


def _near(value: Any, choices: Sequence[str]) -> str:
    return did_you_mean(str(value), choices) or f" Use {choices[0]!r}."
