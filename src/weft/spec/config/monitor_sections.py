"""Sections of a config that say how a run is watched: figures, sinks, alerts and who hears of them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from weft.spec.config.section import Section
from weft.spec.config.setting_types import Address, Count, Duration, Name, PositiveFloat, PositiveInt, SecretRef


class MonitorSection(Section):
    """Figures of ranks and machines."""

    figures: bool = True
    """Whether each rank reports figures of itself and its machine (CPU, memory, GPU, disk, network, where a step's time
    went); events.jsonl gets them folded over the ranks."""
    every: Duration = "10s"
    """Time between two reports."""
    update_ratio_every: Count = 10
    """Every so many steps, how far the step moved the weights is measured (`update_ratio`). 0: never."""

    def measures_update(self, step: int) -> bool:
        """Return whether a step, counted from 1, measures its update."""
        return self.update_ratio_every > 0 and step % self.update_ratio_every == 0


class SinkSection(Section):
    """Where figures go beside events.jsonl.

    A process beside the ranks sends them, so that none can hold up training; what cannot be sent now is sent later.
    """

    kind: Literal["tensorboard", "wandb", "mlflow", "trackio", "prometheus", "pushgateway", "otlp", "http"] = Field(
        examples=["prometheus"]
    )
    """tensorboard: event files in the run folder; wandb, trackio: through their packages; mlflow, pushgateway, otlp (an
    OpenTelemetry collector) and http (JSON): posted to `url`; prometheus: /metrics on `port`, to be scraped."""
    name: Name | None = None
    """Its name in messages, and of the file that keeps how far it is; by default its kind."""
    url: Address | None = None
    """Server, such as http://localhost:5000. A secret one is given as env:NAME or file:PATH."""
    host: str = "127.0.0.1"
    """prometheus: the address that /metrics listens on."""
    port: PositiveInt = 9464
    """prometheus: the port that /metrics listens on."""
    project: str = "weft"
    """Project of wandb and trackio, experiment of mlflow, job of a push gateway."""
    token: SecretRef | None = None
    """Bearer token of the server, or API key of wandb: env:NAME or file:PATH."""
    user: str = ""
    """User name for a server that wants a password."""
    password: SecretRef | None = None
    """Password of `user`: env:NAME or file:PATH."""
    timeout: Duration = "10s"
    """How long one request may take before it is tried again."""


class ChannelSection(Section):
    """Who hears of alerts."""

    name: Name = Field(examples=["ops"])
    """What `actions` of an alert call it."""
    kind: Literal["mail", "webhook", "apprise", "command"] = Field(examples=["mail"])
    """mail: by SMTP; webhook: JSON posted to `url`; apprise: Slack, Teams, Feishu, DingTalk, Telegram and 130 more
    (extra `apprise`); command: a program that gets the message as JSON on its standard input."""
    to: tuple[str, ...] = Field(default=(), strict=False)
    """mail: addresses."""
    sender: str = "weft@localhost"
    """mail: the address that it comes from."""
    server: str = "localhost:25"
    """mail: host:port of the SMTP server."""
    security: Literal["none", "starttls", "tls"] = "none"
    """mail: how the connection is encrypted. With a password it must be."""
    user: str = ""
    """mail: user name of the server."""
    password: SecretRef | None = None
    """mail: password of `user`: env:NAME or file:PATH."""
    url: Address | None = None
    """webhook: where to post; apprise: its address. Where it holds a secret, as most do: env:NAME or file:PATH."""
    command: tuple[str, ...] = Field(default=(), strict=False)
    """command: the program and its arguments, as a list."""
    timeout: Duration = "20s"
    """How long one try may take."""
    standard: bool = True
    """Whether it hears of the alerts of the standard set, from severity warning on."""


class AlertSection(Section):
    """A condition over figures, and what follows once it is true."""

    name: Name = Field(examples=["plateau"])
    """Its name in messages and events."""
    when: str = Field(examples=["eval.loss no better for 3 evaluations"])
    """The condition, such as "eval.loss no better for 3 evaluations", "loss > 6 sigma over 200 steps" or "disk.free <
    20GiB"."""
    until: str | None = None
    """Condition that ends the alert; by default `when` no longer holds. A bound apart from that of `when` keeps a
    figure that wavers around it from alerting again and again."""
    severity: Literal["info", "warning", "critical"] = "warning"
    """How much it matters."""
    actions: tuple[str, ...] = Field(default=(), strict=False)
    """Names of channels, and what the run does: checkpoint, hold (save, release the devices, wait for `weft resume`),
    stop, lower_lr, skip_data, roll_back."""
    quiet: Duration = "30m"
    """Time after an alert in which the same one is recorded and sends nothing."""
    after_step: Count = 0
    """Steps of the run that are let pass before it is judged."""
    factor: PositiveFloat = Field(default=0.5, le=1)
    """lower_lr: what the learning rate is multiplied by."""
    says: str = ""
    """What the message adds for its reader."""
