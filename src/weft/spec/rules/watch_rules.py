"""What must hold of alerts, channels and sinks: conditions that can be read, actions that exist, what a kind needs."""

from __future__ import annotations

from collections.abc import Iterator

from weft.errors import Problem, did_you_mean
from weft.spec.config import AlertSection, ChannelSection, RunConfig, SinkSection
from weft.spec.figures import parse_condition
from weft.spec.written import holds_secret

#: What the ranks can be asked for by an alert.
RUN_WORDS = ("checkpoint", "hold", "stop", "lower_lr", "skip_data", "roll_back")
_NEEDS_URL = ("mlflow", "pushgateway", "otlp", "http")


def watch_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what is wrong with the tables [[alert]], [[channel]] and [[sink]]."""
    for kind, tables in (("alert", config.alert), ("channel", config.channel), ("sink", config.sink)):
        names = [sink_name(one) if isinstance(one, SinkSection) else one.name for one in tables]
        for place, name in enumerate(names):
            if name in names[:place]:
                yield Problem(
                    f"{kind}.{place}.name",
                    f"{kind}.{place}.name={name}: another [[{kind}]] has this name. Use e.g. {name}-{place + 1}.",
                )
    for place, alert in enumerate(config.alert):
        yield from _of_alert(f"alert.{place}", alert, [channel.name for channel in config.channel])
    for place, channel in enumerate(config.channel):
        yield from _of_channel(f"channel.{place}", channel)
    for place, sink in enumerate(config.sink):
        yield from _of_sink(f"sink.{place}", sink)


def sink_name(sink: SinkSection) -> str:
    """Return what a sink is called."""
    return sink.name or sink.kind


def _of_alert(key: str, alert: AlertSection, channels: list[str]) -> Iterator[Problem]:
    for field, text in (("when", alert.when), ("until", alert.until)):
        try:
            if text is not None:
                parse_condition(text)
        except ValueError as error:
            said = str(error)
            yield Problem(f"{key}.{field}", f'{key}.{field}="{text}": {said}{"" if said.endswith("?") else "."}')
    for action in alert.actions:
        known = [*RUN_WORDS, *channels]
        if action not in known:
            rest = f"Use one of {', '.join(known)}, or add a [[channel]] of this name."
            hint = did_you_mean(action, known)
            yield Problem(
                f"{key}.actions",
                f"{key}.actions={action}: there is no such action and no such channel.{hint or f' {rest}'}",
            )
    ends = [action for action in alert.actions if action in ("hold", "stop", "skip_data", "roll_back")]
    if len(ends) > 1:
        yield Problem(
            f"{key}.actions", f"{key}.actions={', '.join(ends)}: only one of these can end training. Keep one of them."
        )


def _of_channel(key: str, channel: ChannelSection) -> Iterator[Problem]:
    if channel.name in RUN_WORDS:
        yield Problem(
            f"{key}.name",
            f"{key}.name={channel.name}: this is what a run itself can do. Use another name, such as ops.",
        )
    if channel.kind == "mail" and not channel.to:
        yield Problem(f"{key}.to", f'{key}.to=[]: mail needs an address. Use e.g. to = ["you@example.org"].')
    if channel.kind == "mail" and channel.password and channel.security == "none":
        yield Problem(
            f"{key}.security",
            f'{key}.security=none: the password would travel in the clear. Use security = "starttls" or "tls".',
        )
    if channel.kind in ("webhook", "apprise") and channel.url is None:
        yield Problem(
            f"{key}.url", f'{key}.url=none: kind={channel.kind} needs an address. Use e.g. url = "env:HOOK_URL".'
        )
    if channel.kind == "command" and not channel.command:
        yield Problem(
            f"{key}.command", f'{key}.command=[]: a program is needed. Use e.g. command = ["/usr/bin/logger"].'
        )
    yield from _secret_url(key, channel.url, everything=channel.kind == "apprise")


def _of_sink(key: str, sink: SinkSection) -> Iterator[Problem]:
    if sink.kind in _NEEDS_URL and sink.url is None:
        yield Problem(
            f"{key}.url", f'{key}.url=none: kind={sink.kind} needs a server. Use e.g. url = "http://localhost:5000".'
        )
    if sink.port > 65535:
        yield Problem(f"{key}.port", f"{key}.port={sink.port}: a port is at most 65535. Use port = 9464.")
    yield from _secret_url(key, sink.url)


def _secret_url(key: str, url: str | None, *, everything: bool = False) -> Iterator[Problem]:
    if url is None or url.startswith(("env:", "file:")) or not (everything or holds_secret(url)):
        return
    yield Problem(
        f"{key}.url",
        f"{key}.url=***: this address is a secret or may hold one, and the run folder keeps the config. Put it into a "
        f'variable and write url = "env:HOOK_URL".',
    )
