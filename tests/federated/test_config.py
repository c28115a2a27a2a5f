"""The file of a federated run, clients' records, and the clients of a round."""

from __future__ import annotations

import numpy as np
import pytest

from tests.federated.point_task import RECORDS, Points
from tests.federated.runs import write_config
from weft.errors import ConfigError, DataError
from weft.federated.clients import participants, split_records
from weft.federated.config import FaultSettings, FederatedConfig, read_federated

GOOD = "clients = 4\nlocal_steps = 1\n"


def samples(**options):
    return Points(**options).samples("train")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("clients = 4\n", "local_steps: exactly one of local_steps and local_epochs is set. Use local_steps = 10."),
        ("local_steps = 1\n", "clients=0: split = 'equal' needs their number. Use clients = 20."),
        (GOOD + "rounds = 0\n", "rounds=0: a whole number from 1 to 1000000 is needed. Use e.g. rounds=10."),
        (GOOD + "rounds = 1.5\n", "rounds=1.5: a whole number from 1 to 1000000 is needed."),
        (GOOD + "split = 'equl'\n", "split=equl: one of equal, dirichlet, column is needed. Did you mean 'equal'?"),
        (GOOD + "alpha = 0.1\n", "alpha=0.1: it belongs to split = 'dirichlet'. Leave it out."),
        (GOOD + "sampled = 5\n", "sampled=5: there are 4 clients. Use at most that number."),
        (GOOD + "split = 'column'\ncolumn = 'user'\n", "clients=4: each value of the column is a client. Leave"),
        (GOOD + "[server]\nmu = 0.1\n", "server.mu: only method = 'fedprox' reads it. Leave it out."),
        (GOOD + "[server]\nmethod = 'fedadam'\n", "server.lr: fedadam's steps do not follow the size of updates"),
        (GOOD + "[server]\nmethod = 'fedadam'\nmomentum = 0.9\n", "server.momentum: fedadam has beta1 instead. Leave"),
        (GOOD + "[server]\ntrim = 0.5\nmethod = 'trimmed_mean'\n", "server.trim=0.5: a number from 0 and below 0.5 is"),
        (
            GOOD + "[faults]\ndrop = 1.0\n",
            "faults.drop=1.0: a number from 0 and below 1 is needed. Use e.g. faults.drop=0.0",
        ),
        (GOOD + "[privacy]\ndelta = 0.1\n", "privacy.epsilon: [privacy] has neither epsilon nor noise. Set epsilon"),
        (GOOD + "client = 3\n", "unknown key 'client'. Did you mean 'clients'?"),
        (GOOD + "base = ''\n", "unknown key 'base'."),
        (GOOD + "server = 3\n", "server=3: a table is needed. Write its keys below a line [server], or"),
    ],
)
def test_bad_file_is_refused(tmp_path, text, why):
    with pytest.raises(ConfigError) as error:
        read_federated(write_config(tmp_path, text))
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        (
            "plan=tp=2",
            "plan=tp=2: clients are tested with dp_replicate, dp_shard and zero=0 to 2, without local SGD.",
        ),
        ("plan=dp_shard=2 zero=3", "clients are tested with dp_replicate, dp_shard and zero=0 to 2, without local SGD"),
        ("plan=auto", "plan=auto: the planner plans for several ranks. Use plan=dp_replicate=1."),
        ("plan=precision=fp16", "plan.precision=fp16: its loss scale depends on earlier steps"),
        ("train.epochs=2", "train.epochs: the file of a federated run sets local_epochs. Leave train.epochs out."),
    ],
)
def test_bad_clients_config_is_refused(tmp_path, setting, why):
    with pytest.raises(ConfigError) as error:
        read_federated(write_config(tmp_path, GOOD, settings=[setting]))
    assert why in str(error.value)


@pytest.mark.parametrize("alpha", [0.05, 0.3, 100.0])
def test_each_record_belongs_to_one_client(alpha):
    settings = FederatedConfig(base="", clients=20, split="dirichlet", alpha=alpha, local_steps=1)
    for config in (settings, settings.model_copy(update={"split": "equal"})):
        parts = split_records(config, samples())
        assert sorted(np.concatenate(parts)) == list(range(RECORDS))
        assert min(map(len, parts)) >= 1
        again = split_records(config, samples())
        assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))


def test_small_alpha_gives_clients_few_labels():
    labels = np.array([int(one["labels"]) for one in samples()])
    settings = FederatedConfig(base="", clients=5, split="dirichlet", alpha=0.05, local_steps=1)
    skewed, even = (split_records(settings.model_copy(update={"alpha": alpha}), samples()) for alpha in (0.05, 1000.0))

    def purity(parts):
        return np.mean([np.bincount(labels[part]).max() / len(part) for part in parts])

    assert purity(skewed) > purity(even) + 0.15


def test_clients_by_column():
    config = FederatedConfig(base="", split="column", column="user", local_steps=1)
    assert [part[:2].tolist() for part in split_records(config, samples())] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    with pytest.raises(DataError, match=r"column=user: record 5 has no single value in it. Its columns: x, labels, us"):
        split_records(config, samples(gap=5))
    with pytest.raises(DataError, match=r"column=usr: record 0 has no single value"):
        split_records(config.model_copy(update={"column": "usr"}), samples())
    with pytest.raises(DataError, match=r"clients=61: there are 60 records. Use at most that number of clients."):
        split_records(FederatedConfig(base="", clients=61, local_steps=1), samples())


def test_faults_follow_their_rates_and_are_functions_of_round_and_client():
    faults = FaultSettings(drop=0.2, straggle=0.5, late="partial")
    config = FederatedConfig(base="", clients=1000, sampled=600, local_steps=9, seed=1, faults=faults)
    first, again, later = (participants(config, [5] * 1000, 8, round_, None) for round_ in (0, 0, 1))
    assert first == again
    assert set(first.steps) != set(later.steps)
    assert abs(first.dropped / 600 - 0.2) < 0.05
    assert abs(first.late / 480 - 0.5) < 0.08
    assert first.dropped + len(first.steps) == 600
    assert sum(steps < 9 for steps in first.steps.values()) > 0.3 * len(first.steps)
    assert min(first.steps.values()) >= 1
    left_out = config.model_copy(update={"faults": FaultSettings(drop=0.2, straggle=0.5)})
    out = participants(left_out, [5] * 1000, 8, 0, None)
    assert set(out.steps.values()) == {9}
    assert set(out.steps) < set(first.steps)
    assert len(out.steps) == len(first.steps) - first.late


def test_private_rounds_draw_clients_independently():
    config = FederatedConfig(base="", clients=1000, sampled=100, local_steps=1)
    counts = [len(participants(config, [5] * 1000, 8, round_, b"k" * 32).steps) for round_ in range(40)]
    assert len(set(counts)) > 5
    assert abs(np.mean(counts) - 100) < 8
