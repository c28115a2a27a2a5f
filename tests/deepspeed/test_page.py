"""docs/reference/deepspeed_keys.md lists the keys. The example in how-to/from_deepspeed.md is the importer's output."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from weft.interop.deepspeed import import_deepspeed

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "how-to" / "from_deepspeed.md").read_text()
KEYS = (DOCS / "reference" / "deepspeed_keys.md").read_text()


def test_table_is_current():
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.deepspeed_page(KEYS) == KEYS, "run: python docs/generate.py"
    assert KEYS.count("\n| `") > 90


def test_example_equals_the_importers_output():
    (config,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.M | re.S)
    (report,) = re.findall(r"^```text\n(.*?)^```", PAGE, re.M | re.S)
    imported = import_deepspeed(config, 4)
    assert f"the plan `{imported.plan}`" in PAGE
    assert report.splitlines() == [str(line) for line in imported.lines]


def test_documented_defaults_are_filled_in():
    imported = import_deepspeed({"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}})
    assert imported.overrides["optimizer.betas"] == (0.9, 0.999)
    assert imported.overrides["optimizer.weight_decay"] == 0
    assert imported.overrides["schedule.warmup_steps"] == 1000
