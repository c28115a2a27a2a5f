"""Server steps against plain formulas, privacy of clients, and refused updates."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.federated.runs import train, weights, write_config
from weft.config.privacy.section import BudgetSection
from weft.errors import ConfigError, PlanError
from weft.federated.config import FederatedConfig, ServerSettings, client_privacy
from weft.federated.server import Server, ServerState
from weft.federated.updates import ClientUpdate
from weft.privacy.accounting import Steps, epsilon_of
from weft.privacy.keys import read_key
from weft.privacy.ledger import PrivacyLedger
from weft.privacy.noise import noise_at

NAMES = {"w": (3, 4), "b": (4,), "scale": ()}


def config(**server) -> FederatedConfig:
    return FederatedConfig(base="", clients=7, local_steps=1, server=ServerSettings(**server))


def updates(round_: int, number: int = 7) -> list[ClientUpdate]:
    random = torch.Generator().manual_seed(round_)
    return [
        ClientUpdate(
            round_, n, 3 + n, 1.0,
            {name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in NAMES.items()},
        )
        for n in range(number)
    ]  # fmt: skip


def state() -> ServerState:
    return ServerState(0, {name: torch.ones(shape, dtype=torch.float64) for name, shape in NAMES.items()})


def stacked(some: list[ClientUpdate], name: str) -> np.ndarray:
    return np.stack([one.delta[name].numpy() for one in some])


def run(server: Server, rounds: int = 3) -> dict[str, np.ndarray]:
    for round_ in range(rounds):
        some = updates(round_)
        server.step(range(7), [lambda one=one: one for one in reversed(some)])
    return {name: one.numpy() for name, one in server.state.weights.items()}


def test_weighted_mean_with_nesterov_momentum():
    found = run(Server(config(momentum=0.9, lr=0.7), state(), buffers=["b"]))
    sizes = np.arange(3, 10)
    for name, shape in NAMES.items():
        weight, momentum = np.ones(shape), np.zeros(shape)
        for round_ in range(3):
            delta = np.average(stacked(updates(round_), name), axis=0, weights=sizes)
            momentum = 0.9 * momentum + delta
            weight = weight - (delta if name == "b" else 0.7 * (delta + 0.9 * momentum))
        np.testing.assert_allclose(found[name], weight, atol=1e-12)


def test_fedadam():
    found = run(Server(config(method="fedadam", lr=0.1, tau=0.01, weights="equal"), state()))
    for name, shape in NAMES.items():
        weight, first, second = np.ones(shape), np.zeros(shape), np.zeros(shape)
        for round_ in range(3):
            delta = stacked(updates(round_), name).mean(0)
            first, second = 0.9 * first + 0.1 * delta, 0.99 * second + 0.01 * delta**2
            weight = weight - 0.1 * first / (np.sqrt(second) + 0.01)
        np.testing.assert_allclose(found[name], weight, atol=1e-12)


@pytest.mark.parametrize(("method", "trim"), [("median", 0.1), ("trimmed_mean", 0.3), ("trimmed_mean", 0.0)])
def test_robust_means(method, trim, monkeypatch):
    monkeypatch.setattr("weft.federated.server._AT_ONCE", 35)  # several chunks
    found = run(Server(config(method=method, trim=trim, lr=0.5), state()))
    for name, shape in NAMES.items():
        weight, cut = np.ones(shape), int(trim * 7)
        for round_ in range(3):
            every = np.sort(stacked(updates(round_), name), axis=0)
            weight = weight - 0.5 * (np.median(every, 0) if method == "median" else every[cut : 7 - cut].mean(0))
        np.testing.assert_allclose(found[name], weight, atol=1e-12)


def test_state_survives_a_file(tmp_path):
    whole = run(Server(config(method="fedadam"), state()))
    server = Server(config(method="fedadam"), state())
    for round_ in range(3):
        server.state.save(tmp_path / "state")
        server = Server(config(method="fedadam"), ServerState.load(tmp_path / "state"))
        server.step(range(7), [lambda one=one: one for one in updates(round_)])
    assert all(np.array_equal(whole[name], one.numpy()) for name, one in server.state.weights.items())


def test_private_round_clips_and_adds_noise_once():
    settings = config(weights="equal").model_copy(
        update={"privacy": BudgetSection(noise=0.8, delta=1e-2, clip=0.5), "sampled": 5}
    )
    ledger, key = PrivacyLedger(client_privacy(settings, 7, "test:3")), read_key("test:3")
    server = Server(settings, state(), (), ledger, key)
    result = server.step(range(6), [lambda one=one: one for one in updates(0, 6)])
    assert result.clipped == 6
    norms = [sum(float(x.square().sum()) for x in one.delta.values()) ** 0.5 for one in updates(0, 6)]
    for name, shape in NAMES.items():
        total = sum(one.delta[name].numpy() * 0.5 / norm for one, norm in zip(updates(0, 6), norms, strict=True))
        noise = noise_at(key, 0, name, np.arange(int(np.prod(shape)))).reshape(shape)
        np.testing.assert_allclose(server.state.weights[name].numpy(), 1 - (total + 0.4 * noise) / 5, atol=1e-12)
    server.step([], [])  # a round without clients is accounted, and has noise
    assert ledger.steps == [Steps(0.8, 5 / 7, 2)]
    assert not torch.equal(server.state.weights["w"], torch.ones(3, 4, dtype=torch.float64))


PRIVATE = """
rounds = 20
clients = 20
sampled = 10
local_steps = 1
[server]
weights = "equal"
[privacy]
noise = 2.0
epsilon = 2.5
delta = 0.01
key = "test:9"
"""


def test_budget_ends_the_run(tmp_path):
    result = train(write_config(tmp_path, PRIVATE), tmp_path / "out")
    assert result.is_spent
    assert 1 < result.state.round < 20
    assert result.epsilon == pytest.approx(epsilon_of([Steps(2.0, 0.5, result.state.round)], 0.01))
    assert result.epsilon <= 2.5
    before = weights(tmp_path / "out")
    again = train(write_config(tmp_path, PRIVATE), tmp_path / "out")
    assert again.state.round == result.state.round
    assert torch.equal(before["0.bias"], weights(tmp_path / "out")["0.bias"])
    assert json.loads((tmp_path / "out/federated.json").read_text())["privacy"]["key"] == "test:9"


def test_private_runs_that_promise_nothing_are_refused(tmp_path):
    for old, new, why in (
        ("delta = 0.01", "delta = 0.06", "privacy.delta=0.06: with 20 records, a delta from 1/20 on allows"),
        ('weights = "equal"', "", "server.weights=samples: a client with many records would exceed the clipping norm"),
        ("[server]", "[server]\nmethod = 'median'", "server.method=median: noise is calibrated for sums of clipped"),
    ):
        with pytest.raises(ConfigError, match=why.replace("[", r"\[")):
            train(write_config(tmp_path, PRIVATE.replace(old, new)), tmp_path / "out")
    with pytest.raises(ConfigError, match=r"clients average the buffer 1.running_mean, and noise makes running"):
        train(write_config(tmp_path, PRIVATE, options="norm = true"), tmp_path / "out")
    column = PRIVATE.replace("clients = 20\nsampled = 10", "split = 'column'\ncolumn = 'user'").replace("0.01", "0.3")
    with pytest.raises(PlanError, match=r"privacy.delta=0.3: with 4 records"):
        train(write_config(tmp_path, column), tmp_path / "users")


def changed(name: str, value: torch.Tensor | None) -> dict[str, torch.Tensor]:
    delta = dict(updates(0)[1].delta)
    if value is None:
        del delta[name]
    else:
        delta[name] = value
    return delta


BAD = {
    "client=1: w has values that are not finite.": {"delta": changed("w", torch.full((3, 4), float("nan")).double())},
    "client=1: b is (5,) torch.float64, and the model's is (4,) torch.float64.": {
        "delta": changed("b", torch.zeros(5, dtype=torch.float64))
    },
    "client=1: b is (4,) torch.float32, and the model's is (4,) torch.float64.": {
        "delta": changed("b", torch.zeros(4))
    },
    "client=1: its update has other tensors than the model, such as w.": {"delta": changed("w", None)},
    "client=1: its update is of round 4, and this is round 0.": {"round": 4},
    "client=9: it is no client of round 0.": {"client": 9},
    "client=0: it sent a second update in round 0.": {"client": 0},
    "client=1: its loss is not finite.": {"loss": float("inf")},
    "client=1: it reports 0 records, and an update has 1 to 1000000000000.": {"samples": 0},
    "client=1: it reports too many records, and an update has 1 to 1000000000000.": {"samples": 10**400},
}


@pytest.mark.parametrize("why", BAD)
def test_bad_update_is_left_out(why):
    good, server = updates(0), Server(config(weights="equal"), state())
    sent = [good[0], replace(good[1], **BAD[why]), *good[2:]]
    result = server.step(range(7), [lambda one=one: one for one in sent])
    assert result.refused == [why]
    assert server.state.refused == 1
    assert result.used == [0, 2, 3, 4, 5, 6]
    wanted = 1 - np.stack([one.delta["w"].numpy() for one in good if one.client != 1]).mean(0)
    np.testing.assert_allclose(server.state.weights["w"].numpy(), wanted, atol=1e-12)
