"""Rules for energy, alerts, channels and sinks: valid conditions, existing actions, required settings of each kind."""

from __future__ import annotations

from collections.abc import Iterator

from weft.config.energy import EnergyPrice, carbon_intensity
from weft.config.metrics import parse_condition
from weft.config.run_config import RunConfig
from weft.config.sections import AlertSection, ChannelSection, SinkSection, holds_secret
from weft.errors import Problem, did_you_mean

#: Actions that an alert may request of a run.
RUN_WORDS = ("checkpoint", "hold", "stop", "lower_lr", "skip_data", "roll_back")
_NEEDS_URL = ("mlflow", "pushgateway", "otlp", "http")


def energy_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems of the section [energy]."""
    energy = config.energy
    for key, text, parse in (("grid", energy.grid, carbon_intensity), ("price", energy.price, EnergyPrice.parse)):
        try:
            if text is not None:
                parse(text)
        except ValueError as error:
            yield Problem.of(f"energy.{key}", text, str(error))
    if energy.budget is not None and not energy.meter:
        rule = "energy.meter=false measures nothing. Use energy.meter=true, or leave energy.budget out."
        yield Problem.of("energy.budget", f"{energy.budget:g}", rule)


def watch_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems of the tables [[alert]], [[channel]] and [[sink]]."""
    for kind, tables in (("alert", config.alert), ("channel", config.channel), ("sink", config.sink)):
        names = [one.name or one.kind if isinstance(one, SinkSection) else one.name for one in tables]
        for index, name in enumerate(names):
            if name in names[:index]:
                rule = f"another [[{kind}]] has this name. Use e.g. {name}-{index + 1}."
                yield Problem.of(f"{kind}.{index}.name", name, rule)
    for index, alert in enumerate(config.alert):
        yield from _of_alert(f"alert.{index}", alert, [channel.name for channel in config.channel])
    for index, channel in enumerate(config.channel):
        yield from _of_channel(f"channel.{index}", channel)
    for index, sink in enumerate(config.sink):
        key = f"sink.{index}"
        if sink.kind in _NEEDS_URL and sink.url is None:
            rule = f'kind={sink.kind} needs a server. Use e.g. url = "http://localhost:5000".'
            yield Problem.of(f"{key}.url", "none", rule)
        if sink.port > 65535:
            yield Problem.of(f"{key}.port", sink.port, "a port is at most 65535. Use port = 9464.")
        yield from _secret_url(key, sink.url)


def _of_alert(key: str, alert: AlertSection, channels: list[str]) -> Iterator[Problem]:
    for field, text in (("when", alert.when), ("until", alert.until)):
        try:
            if text is not None:
                parse_condition(text)
        except ValueError as error:
            rule = str(error)
            yield Problem.of(f"{key}.{field}", f'"{text}"', rule if rule.endswith("?") else f"{rule}.")
    for action in alert.actions:
        known = [*RUN_WORDS, *channels]
        if action not in known:
            remedy = f" Use one of {', '.join(known)}, or add a [[channel]] of this name."
            rule = f"there is no such action and no such channel.{did_you_mean(action, known) or remedy}"
            yield Problem.of(f"{key}.actions", action, rule)
    ends = [action for action in alert.actions if action in ("hold", "stop", "skip_data", "roll_back")]
    if len(ends) > 1:
        yield Problem.of(f"{key}.actions", ", ".join(ends), "only one of these can end training. Keep one of them.")


def _of_channel(key: str, channel: ChannelSection) -> Iterator[Problem]:
    if channel.name in RUN_WORDS:
        rule = "this is the name of a run's action. Use another name, such as ops."
        yield Problem.of(f"{key}.name", channel.name, rule)
    if channel.kind == "mail" and not channel.to:
        yield Problem.of(f"{key}.to", "[]", 'mail needs an address. Use e.g. to = ["you@example.org"].')
    if channel.kind == "mail" and channel.password and channel.security == "none":
        rule = 'the password would be sent unencrypted. Use security = "starttls" or "tls".'
        yield Problem.of(f"{key}.security", "none", rule)
    if channel.kind in ("webhook", "apprise") and channel.url is None:
        rule = f'kind={channel.kind} needs an address. Use e.g. url = "env:HOOK_URL".'
        yield Problem.of(f"{key}.url", "none", rule)
    if channel.kind == "command" and not channel.command:
        yield Problem.of(f"{key}.command", "[]", 'a program is needed. Use e.g. command = ["/usr/bin/logger"].')
    yield from _secret_url(key, channel.url, everything=channel.kind == "apprise")


def _secret_url(key: str, url: str | None, *, everything: bool = False) -> Iterator[Problem]:
    if url is not None and not url.startswith(("env:", "file:")) and (everything or holds_secret(url)):
        rule = "this address is or may contain a secret, and the run folder stores the config. Put it into a variable"
        yield Problem.of(f"{key}.url", "***", f'{rule} and write url = "env:HOOK_URL".')
