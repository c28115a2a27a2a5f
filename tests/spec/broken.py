"""Ways to break a config. Each changes tables, overrides or text, and records the names that the error must contain."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from hypothesis import strategies as st

BASE = {
    "plan": "dp_replicate=2 accumulation=2",
    "seed": 7,
    "run": {"name": "broken"},
    "model": {"name": "tiny", "dim": 256, "num_heads": 8},
    "tokenizer": {"kind": "bpe", "vocab_size": 4096},
    "data": {
        "holdout": 0.02,
        "packing": "fit",
        "train": [{"path": "a.txt", "weight": 1.0}, {"path": "b.jsonl", "columns": {"text": "body"}}],
    },
    "optimizer": {"name": "adamw", "lr": 1e-3, "betas": [0.9, 0.95], "nesterov": False},
    "schedule": {"kind": "cosine", "warmup_steps": 20},
    "train": {"steps": 300, "seq_len": 128, "global_batch": 16, "early_stop": {"patience": 3}},
    "eval": {"every": 50},
    "checkpoint": {"keep_best": True},
    "sample": {"temperature": 0.8},
    "launch": {"ranks": 2},
}


@dataclass
class Case:
    """A config that is being broken. names: what the error must contain. text_break: kind and index of a text error."""

    tables: dict = field(default_factory=lambda: copy.deepcopy(BASE))
    overrides: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    changed: set[str] = field(default_factory=set)
    text_break: tuple[str, int] | None = None

    def table(self, path):
        node = self.tables
        for part in path:
            node = node[part]
        return node

    def free(self, section):
        """Mark a section as changed. Return whether it was unchanged before."""
        is_free = section not in self.changed
        self.changed.add(section)
        return is_free


TABLES = [(), ("run",), ("model",), ("tokenizer",), ("data",), ("data", "train", 0), ("data", "train", 1, "columns"),
          ("optimizer",), ("schedule",), ("train",), ("train", "early_stop"), ("eval",), ("checkpoint",), ("sample",),
          ("log",), ("launch",)]  # fmt: skip
WRONG = {
    ("seed",): [-1, 1.5, "7", True, 2**63, 10**30, [], {}, float("nan")],
    ("run", "name"): ["", "a/b", "..", 3, "é" * 9, "x" * 101],
    ("model", "name"): ["tinny", 3, ""],
    ("model", "dim"): [0, -256, 10**9, 256.5, "256"],
    ("model", "num_heads"): [0, 1.5, 10**7],
    ("tokenizer", "kind"): ["bp", 1, True],
    ("tokenizer", "vocab_size"): [299, 10**7, 4096.5, "4k", -(10**25)],
    ("data", "holdout"): [1, -0.1, "0.02", float("inf"), float("nan"), 10**400],
    ("data", "packing"): ["fitt", "", 0],
    ("data", "train"): [[], {}, 3, [3], [[]], {"path": "a.txt"}, True],
    ("data", "train", 0, "path"): [3, ["a"], {}],
    ("data", "train", 0, "weight"): [0, -1.0, float("inf"), "1", []],
    ("data", "train", 1, "columns"): ["text", [], {"txt": "body"}, {"text": 3}],
    ("optimizer",): [3, "adamw", [], [{"lr": 1e-3}]],
    ("optimizer", "name"): ["adam", "", 1, []],
    ("optimizer", "lr"): [0, -1e-3, float("nan"), float("inf"), "1e-3", True, [1e-3], {"peak": 1}],
    ("optimizer", "betas"): [[], [0.9], [0.9, 0.95, 0.99], [0.9, 1.0], ["a", "b"], 0.9, {}],
    ("optimizer", "nesterov"): [0, "false", None, "no"],
    ("schedule", "kind"): ["cosin", 3],
    ("schedule", "warmup_steps"): [-1, 2.5],
    ("train",): [[], "fast", 0],
    ("train", "steps"): [0, -5, 1.5, "300", 10**40, False],
    ("train", "seq_len"): [0, 10**10, "128"],
    ("train", "global_batch"): [0, 16.5, -16],
    ("train", "early_stop"): [3, [], True],
    ("train", "early_stop", "patience"): [0, "3", 1.5],
    ("eval", "every"): [-1, "50"],
    ("checkpoint", "keep_best"): [1, "yes", []],
    ("sample", "temperature"): [-0.1, float("nan"), "hot"],
    ("launch", "ranks"): ["al", 0, -1, 1.5, True],
}
# Values that only a rule between keys rejects, with the sections that the rule reads.
RELATED = [
    (("model", "dim"), 255, ["model"]),
    (("model", "num_heads"), 7, ["model"]),
    (("model", "vocab_size"), 3000, ["model", "tokenizer"]),
    (("schedule", "warmup_steps"), 301, ["schedule", "train"]),
    (("schedule", "decay_steps"), 30, ["schedule", "train"]),
    (("tokenizer", "path"), "there", ["tokenizer"]),
    (("optimizer", "nesterov"), True, ["optimizer"]),
    (("train", "seq_len"), 4096, ["train", "model"]),
    (("train", "global_batch"), 15, ["train", "plan"]),
    (("eval", "every"), 0, ["eval", "train"]),
]
BAD_PLANS = {
    "dp_shrad=4": "dp_shrad", "tp=0": "tp", "tp=two": "tp", "zero=4": "zero", "auto tp=0": "tp", "auto tp": "tp",
    "tp": "tp", "sp=on": "sp",
    "dp_replicate=* tp=*": "tp", "dp_shard=2 zero=0": "dp_shard",
    "zero=0 reshard=after_step": "reshard", "precision=bf61": "precision", "sp=maybe": "sp",
    "offload=disk": "offload", "recompute=most": "recompute", "dp_replicate=99999999999999": "dp_replicate",
    "dp_replicate=3": "global_batch", "compile=on compile=off": "compile", "microbatches=2": "microbatches", "=": "=",
}  # fmt: skip
BAD_PLAN_TABLES = [
    {"dp_shrad": 4}, {"tp": 0}, {"sp": True}, {"tp": [2]}, {"zero": {}}, {"precision": 3}, {"offload": [3]},
    {"compile": 3}, {"recompute": 10**30}, {"dp_replicate": 10**50}, {"tp": -1}, {"sp": "maybe"}, {"schedule": []},
    {"pp": float("nan")},
]  # fmt: skip
BAD_OVERRIDES = {
    "nonsense": "nonsense", "train.steps": "train.steps", "=3": "=3", "seed.deep=1": "seed", "a b=1": "a b",
    "optimizer.lr.x=1": "optimizer", "optimzer.lr=1": "optimzer", "..=1": "..", "[a]=1": "[a]", "\n=1": "override",
    "data.train.9.path=x": "data.train.9", "data.train.path=x": "data.train", "data.eval.1.path=x": "data.eval.1",
    "log.evry=3": "log.evry", "log.every=0": "log.every", "log.every=often": "log.every", "log=3": "log",
    "plan.tpp=2": "tpp", "plan.tp=-1": "tp", "train.steps=[": "train.steps", "seed=9e999": "seed",
    "seed=" + "9" * 5000: "seed", "x=" + "[" * 4000: "x",
}  # fmt: skip
BAD_LINES = ["lr = ", "= 3", "[unclosed", "a b = 3", "x = 'open", 'y = "\\q"', "z = [1, 2", "w = 01", '"""', "s = nul",
             "v = {a = 1,, b = 2}", "u = 2024-13-45", "just words", "t = 1 2", "[[data.train]"]  # fmt: skip


def unknown_key(draw, case):
    path = draw(st.sampled_from(TABLES))
    name = draw(st.text("abcdefghij_", min_size=2, max_size=12).map("zz".__add__))
    if case.free(path[0] if path else f"key {name}"):
        node = case.tables
        for part in path:
            node = node.setdefault(part, {}) if isinstance(node, dict) else node[part]
        node[name] = draw(st.sampled_from([1, "x", {"y": 1}, [1], True]))
        case.names.append(name)


def misspelt_section(draw, case):
    name = draw(st.sampled_from(["run", "model", "tokenizer", "data", "optimizer", "schedule", "train", "eval"]))
    at = draw(st.integers(0, len(name) - 1))
    if case.free(name):
        misspelt = name[:at] + "x" + name[at:]
        case.tables[misspelt] = case.tables.pop(name)
        case.names.append(misspelt)


def wrong_value(draw, case):
    path = draw(st.sampled_from(sorted(WRONG, key=str)))
    value = draw(st.sampled_from(WRONG[path]))
    if case.free(path[0]) and value is not None:
        case.table(path[:-1])[path[-1]] = value
        case.names.append(str(path[-1]))


def related_value(draw, case):
    path, value, sections = draw(st.sampled_from(RELATED))
    if not case.changed & set(sections):
        case.changed.update(sections)
        case.table(path[:-1])[path[-1]] = value
        case.names.append(path[-1])


def bad_plan(draw, case):
    text = draw(st.sampled_from(sorted(BAD_PLANS)))
    if case.free("plan") and (BAD_PLANS[text] != "global_batch" or case.free("train")):
        case.tables["plan"] = text
        case.names.append(BAD_PLANS[text])


def bad_plan_table(draw, case):
    table = draw(st.sampled_from(BAD_PLAN_TABLES))
    if case.free("plan"):
        case.tables["plan"] = copy.deepcopy(table)
        case.names.append(next(iter(table)))


def bad_override(draw, case):
    override = draw(st.sampled_from(sorted(BAD_OVERRIDES)))
    section = override.partition("=")[0].partition(".")[0]
    if case.free(section if section in BASE else f"override {override}"):
        case.overrides.append(override)
        case.names.append(BAD_OVERRIDES[override])


def bad_text(draw, case):
    if case.text_break is None:
        kind = draw(st.sampled_from(["line", "bytes", "twice", "section twice"]))
        line = draw(st.sampled_from(BAD_LINES)) if kind == "line" else kind
        case.text_break = (line, draw(st.integers(0, 10**6)))


MISTAKES = [unknown_key, misspelt_section, wrong_value, related_value, bad_plan, bad_plan_table, bad_override, bad_text]


@st.composite
def broken_configs(draw):
    """Return a valid config with one to three mistakes."""
    case = Case()
    for make_mistake in draw(st.lists(st.sampled_from(MISTAKES), min_size=1, max_size=3)):
        make_mistake(draw, case)
    if not case.names and case.text_break is None:
        case.overrides.append("nonsense")
        case.names.append("nonsense")
    return case
