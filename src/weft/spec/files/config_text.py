"""Print a config: as a TOML file, and what may stand in one as a JSON Schema."""

from __future__ import annotations

from typing import cast

from weft.spec.config import RunConfig
from weft.spec.plan import PLAN_FIELDS


def format_config(config: RunConfig) -> str:
    """Return the config as a TOML file that loads back to an equal one."""
    import tomli_w

    tables = config.model_dump(by_alias=True, exclude_none=True)
    if config.task.name is None and not config.task.options:
        del tables["task"]
    if config.train.epochs is not None:
        del tables["train"]["steps"]  # a file may have one of the two; epochs decide
    for name in ("train", "eval"):  # a table for each source reads better than one long line
        for source in tables["data"][name]:
            if not source["columns"]:
                del source["columns"]
    return tomli_w.dumps(tables)


def config_schema() -> dict[str, object]:
    """Return the JSON Schema of a config file, short forms included; editors use it to complete and check."""
    schema = cast(dict[str, object], RunConfig.model_json_schema())
    properties = cast(dict[str, dict[str, object]], schema["properties"])
    plan = properties["plan"]
    plan["anyOf"] = [{"type": plan.pop("type")}, _plan_table()]
    properties["task"]["anyOf"] = [{"$ref": properties["task"].pop("$ref")}, _TEXT]
    definitions = cast(dict[str, dict[str, object]], schema["$defs"])
    sources = cast(dict[str, dict[str, object]], definitions["DataSection"]["properties"])
    for name in ("train", "eval"):
        of_tables = {"type": sources[name].pop("type"), "items": {"anyOf": [sources[name].pop("items"), _TEXT]}}
        sources[name]["anyOf"] = [of_tables, _TEXT]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


_TEXT = {"type": "string"}


def _plan_table() -> dict[str, object]:
    fields = {name: {**field.kind.schema(), "description": field.help} for name, field in PLAN_FIELDS.items()}
    return {"type": "object", "additionalProperties": False, "properties": fields}
