"""Channels: mail to a real SMTP server, webhooks, apprise and commands; and the companion process."""

from __future__ import annotations

import email
import json
import sys
import time

import pytest

from tests.monitor.servers import Recorder, free_port, until
from weft.config.run_config import RunConfig
from weft.config.sections import ChannelSection
from weft.errors import ConfigError
from weft.monitor.alerts import Companion, RequestQueue, RunRequest, ask
from weft.monitor.channels import AlertMessage, NotificationSender, send_message
from weft.monitor.events import EventLog
from weft.monitor.sinks.base import SinkTrouble

SECRET = "PLANTED-SECRET-4711"
MESSAGE = AlertMessage("title", "text\nlast line", {"name": "one", "step": 3})


def channel(kind: str, **settings: object) -> ChannelSection:
    return ChannelSection.model_validate({"name": "ops", "kind": kind, "timeout": "2s", **settings})


class Mails:
    """Stores the mails that aiosmtpd receives."""

    def __init__(self) -> None:
        self.mails: list[email.message.Message] = []

    async def handle_DATA(self, server, session, envelope) -> str:
        self.mails.append(email.message_from_bytes(envelope.content))
        return "250 OK"


@pytest.fixture
def smtp():
    controller = pytest.importorskip("aiosmtpd.controller")
    mails = Mails()
    server = controller.Controller(mails, hostname="127.0.0.1", port=free_port())
    server.start()
    mails.port = server.port
    yield mails
    server.stop()


def test_mail_reaches_server(smtp):
    send_message(channel("mail", to=["a@b.c", "d@e.f"], server=f"127.0.0.1:{smtp.port}", sender="weft@x.y"), MESSAGE)
    (mail,) = smtp.mails
    assert (mail["Subject"], mail["From"], mail["To"]) == ("title", "weft@x.y", "a@b.c, d@e.f")
    assert mail.get_payload(decode=True).decode().splitlines() == ["text", "last line"]


def test_mail_to_server_without_encryption_sends_no_password(smtp, monkeypatch):
    monkeypatch.setenv("MAIL_PASSWORD", SECRET)
    with pytest.raises(SinkTrouble) as caught:
        send_message(
            channel("mail", to=["a@b.c"], server=f"127.0.0.1:{smtp.port}", security="starttls", user="me",
                    password="env:MAIL_PASSWORD"),
            MESSAGE,
        )  # fmt: skip
    assert SECRET not in str(caught.value)
    assert not smtp.mails


def test_mail_is_retried_while_server_is_down(smtp):
    port, messages = free_port(), []
    room = NotificationSender(channel("mail", to=["a@b.c"], server=f"127.0.0.1:{port}"), messages.append, pause_s=0.05)
    room.start()
    room.put(MESSAGE)
    until(lambda: messages)
    assert f"mail through 127.0.0.1:{port} failed" in messages[0]
    from aiosmtpd.controller import Controller

    mails = Mails()
    later = Controller(mails, hostname="127.0.0.1", port=port)
    later.start()
    until(lambda: mails.mails)
    room.finish()
    room.join(5)
    later.stop()
    assert not room.is_alive()
    assert len(messages) == 1


def test_webhook_gets_json(monkeypatch):
    with Recorder() as server:
        monkeypatch.setenv("HOOK", f"{server.url}/{SECRET}")
        send_message(channel("webhook", url="env:HOOK"), MESSAGE)
        server.status = 500
        with pytest.raises(SinkTrouble) as caught:
            send_message(channel("webhook", url="env:HOOK"), MESSAGE)
    assert server.bodies() == [{"text": "title\ntext\nlast line", "title": "title", "name": "one", "step": 3}]
    assert SECRET not in str(caught.value)


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")
def test_apprise_sends_to_supported_urls(monkeypatch):
    pytest.importorskip("apprise")
    with Recorder() as server:
        monkeypatch.setenv("PLACE", f"json://127.0.0.1:{server.port}/{SECRET}")
        send_message(channel("apprise", url="env:PLACE"), MESSAGE)
        (body,) = server.bodies()
        assert (body["title"], body["message"].splitlines()) == ("title", ["text", "last line"])
        monkeypatch.setenv("PLACE", f"nosuch://{SECRET}")
        with pytest.raises(SinkTrouble, match="does not support") as caught:
            send_message(channel("apprise", url="env:PLACE"), MESSAGE)
    assert SECRET not in str(caught.value)


def test_command_gets_json_without_shell(tmp_path):
    script = "import json, sys; open(sys.argv[1], 'w').write(json.load(sys.stdin)['title'])"
    send_message(channel("command", command=[sys.executable, "-c", script, str(tmp_path / "a; b")]), MESSAGE)
    assert (tmp_path / "a; b").read_text() == "title"
    with pytest.raises(SinkTrouble, match="ended with exit code 1"):
        send_message(channel("command", command=["false"]), MESSAGE)
    with pytest.raises(SinkTrouble, match=r"command /no/such failed \(No such file or directory\)"):
        send_message(channel("command", command=["/no/such"]), MESSAGE)


def test_message_queue_is_bounded_and_dropped_messages_are_counted(tmp_path):
    room = NotificationSender(channel("command", command=["false"]), lambda text: None)
    for number in range(150):
        room.put(AlertMessage(str(number), "", {}))
    assert len(room._waiting) == 100
    assert "(50 earlier messages were dropped.)" in room._with_dropped(MESSAGE).text


# --- requests ---


def test_requests_are_read_once_over_all_starts(tmp_path):
    ask(tmp_path, RunRequest("hold", "why", "me"))
    with open(tmp_path / "wishes.jsonl", "a") as file:
        file.write('no json\n[1]\n{"action": "explode"}\n{"action": "lower_lr", "factor": 7}\n{"action": "st')
    assert RequestQueue(tmp_path).new() == [RunRequest("hold", "why", "me")]
    assert RequestQueue(tmp_path).new() == []
    with open(tmp_path / "wishes.jsonl", "a") as file:
        file.write('op"}\n')
    assert [wish.action for wish in RequestQueue(tmp_path).new()] == ["stop"]
    ask(tmp_path, RunRequest("stop"))
    assert RequestQueue(tmp_path, since=time.time() + 60).new() == []  # it was meant for an earlier command
    with pytest.raises(ConfigError, match=r"a run cannot do this\. Did you mean 'hold'"):
        ask(tmp_path, RunRequest("hodl"))


# --- companion process ---


def step(number: int, loss: float) -> dict[str, object]:
    return {"event": "step", "time": time.time(), "step": number, "loss": loss, "grad_norm": 1.0, "lr": 0.1}


def test_alert_is_logged_sent_and_requests_its_action(tmp_path, smtp, monkeypatch):
    monkeypatch.setenv("HOOK", "http://127.0.0.1:9/away")
    config = RunConfig.model_validate(
        {
            "run": {"name": "big"},
            "alert": [{"name": "high", "when": "loss > 3 for 2 steps", "severity": "critical", "says": "See RUN.",
                       "actions": ["mail", "hook", "lower_lr", "hold"], "factor": 0.1}],
            "channel": [{"name": "mail", "kind": "mail", "to": ["a@b.c"], "server": f"127.0.0.1:{smtp.port}"},
                        {"name": "hook", "kind": "webhook", "url": "env:HOOK", "timeout": "1s"}],
        }
    )  # fmt: skip
    log = EventLog(tmp_path / "events.jsonl")
    log.write(step(1, 9.0)), log.write(step(2, 9.0))  # in the past: read, but no alert any more
    companion = Companion(tmp_path, config, pause_s=0.05)
    companion.start()
    companion.look()
    assert not (tmp_path / "alerts.jsonl").exists()
    for number, loss in enumerate((2.0, 4.0, 5.0), start=3):
        log.write(step(number, loss))
    companion.look()
    until(lambda: smtp.mails)
    companion.finish(0.2)
    (mail,) = smtp.mails
    assert mail["Subject"] == "[weft] critical: big: high"
    text = mail.get_payload(decode=True).decode()
    for expected in ("Run big at step 5: loss is 5.", "Since step 4.", "Last good metrics: step 3, loss 2",
                 "The run does: lower_lr, hold", f"See {tmp_path}.",
                 f"To continue: weft runs resume {tmp_path}"):  # fmt: skip
        assert expected in text
    (logged,) = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines() if '"fired"' in line]
    assert (logged["name"], logged["step"], logged["since"], logged["severity"]) == ("high", 5, 4, "critical")
    wishes = [wish for wish in RequestQueue(tmp_path).new() if wish.action != "tell"]
    assert wishes == [
        RunRequest("lower_lr", "loss is 5", "alert high", 4, 0.1),
        RunRequest("hold", "loss is 5", "alert high", 4, 0.1),
    ]


def test_run_without_alerts_and_sinks_needs_no_companion():
    assert not Companion.is_needed(RunConfig())
    assert Companion.is_needed(RunConfig(alerts="standard"))
