"""Write the generated pages: docs/reference/rules.md, settings.md and recipes.md, and the generated parts of README.md,
how-to/plan.md, how-to/import_config.md, reference/devices.md and reference/deepspeed_keys.md.

python docs/generate.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import types
import typing
from pathlib import Path

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from weft.config.fields.plan_values import PlanField
from weft.config.files import load_config
from weft.config.plan import PLAN_FIELDS
from weft.config.rules.config_rules import CONFIG_RULES
from weft.config.rules.plan_rules import RULES
from weft.config.run_config import RunConfig
from weft.devices.kinds import KINDS, DeviceKind
from weft.interop.deepspeed_keys import Group, groups
from weft.interop.trainer_keys import Tool, tools

DOCS = Path(__file__).parent
sys.path += [str(DOCS), str(DOCS.parent)]

from mkdocs_hooks import expanded, pages_in  # noqa: E402 (the path comes first)

from tools.record_benchmarks import page as benchmarks_page  # noqa: E402

REFERENCE = DOCS / "reference"
DEEPSPEED, TRAINERS = REFERENCE / "deepspeed_keys.md", DOCS / "how-to" / "import_config.md"
DEVICES = REFERENCE / "devices.md"
RECIPES = DOCS.parent / "configs" / "tune"
FRONT = DOCS / "README.md"
PLAN_COMMAND = "weft plan llama3-8b 8xh100 --top 3"
NOTE = "<!-- Written by docs/generate.py; change the code, not this page. -->\n"


def rules_page() -> str:
    """Return the page of all rules of plans and configs."""
    lines = [
        NOTE,
        "# Rules",
        "These rules refuse a plan or a config and name the nearest fix. The planner prunes with the same rules.",
        "",
        "## Rules of plans",
        "| rule | field | why |",
        "|---|---|---|",
        *(f"| {rule.name} | `{rule.field}` | {rule.reason} |" for rule in RULES),
        "",
        "## Rules of configs",
        "| rule | settings | why |",
        "|---|---|---|",
        *(f"| {rule.name} | {', '.join(f'`{key}`' for key in rule.keys)} | {rule.reason} |" for rule in CONFIG_RULES),
    ]
    return "\n".join(lines) + "\n"


def settings_page() -> str:
    """Return the page of all settings and fields of the plan."""
    lines = [
        NOTE,
        "# Settings",
        "All settings, with their types and defaults. Write them as `section.name`, in TOML or on the command line.",
    ]
    lines += ["", "| setting | type | default | meaning |", "|---|---|---|---|", *_rows(RunConfig, "")]
    lines += [
        "",
        "## Fields of the plan",
        'Write them in one line, as in `plan="tp=2 zero=3"`, or as a table `[plan]`.',
    ]
    lines += ["", "| field | values | default | meaning |", "|---|---|---|---|", *map(_plan_row, PLAN_FIELDS.values())]
    return "\n".join(lines) + "\n"


def _rows(section: type[BaseModel], prefix: str) -> list[str]:
    rows = []
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        inner = _section_in(field.annotation)
        if inner is not None and isinstance(field.default, BaseModel):
            rows += _rows(inner, f"{key}.")
            continue
        meaning = " ".join((field.description or "").split())
        rows.append(f"| `{key}` | {_type(field.annotation)} | {_default(field.default)} | {meaning} |")
        if inner is not None and not any(f".N.{part}`" in row for row in rows for part in inner.model_fields):
            rows += _rows(inner, f"{key}.N.")
    return rows


def _plan_row(field: PlanField) -> str:
    default = field.kind.write(field.default)
    return f"| `{field.name}` | {field.kind.words()} | `{default}` | {field.help} |"


def _section_in(annotation: object) -> type[BaseModel] | None:
    """Return the section type that an annotation is or contains, or None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := _section_in(part))), None)


def _type(annotation: object) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(str(part) for part in parts)
    if origin is typing.Annotated:
        return _type(parts[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(part) for part in parts if part is not type(None))
    if origin is dict:
        return "table"
    if origin is not None:
        inner = dict.fromkeys(_type(part) for part in parts if part is not Ellipsis)
        return f"{origin.__name__} of {', '.join(inner)}".replace("tuple of", "list of")
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    return {"str": "string", "int": "whole number", "float": "number", "bool": "true or false"}.get(
        getattr(annotation, "__name__", ""), str(annotation)
    )


def _default(value: object) -> str:
    if value is PydanticUndefined:
        return "required"
    if value is None or value in ("", (), {}):
        return "-"
    if isinstance(value, tuple):
        return ", ".join(_default(part) for part in value)
    if isinstance(value, BaseModel):
        return f"`{getattr(value, 'path', value)}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def deepspeed_page(page: str) -> str:
    """Return the page of DeepSpeed's keys with its generated table."""
    before, begin, rest = page.partition("<!-- keys:")
    mark, _, rest = rest.partition("\n")
    _, end, after = rest.partition("<!-- end of keys -->")
    table = ["| keys | here | |", "|---|---|---|", *(_group_row(group) for group in groups())]
    return f"{before}{begin}{mark}\n" + "\n".join(table) + f"\n{end}{after}"


def _group_row(group: Group) -> str:
    section = group.keys[0].rpartition(".")[0]
    names = ", ".join(f"`{key.rpartition('.')[2]}`" for key in group.keys)
    keys = f"`{section}`: {names}" if section else names
    return f"| {keys} | {group.outcome} | {group.text} |"


def devices_page(page: str) -> str:
    """Return the page of devices with the generated table of kinds."""
    before, begin, rest = page.partition("<!-- kinds -->")
    _, end, after = rest.partition("<!-- end of kinds -->")
    table = [
        "| `launch.device` | devices | installed by | collectives | `precision` | graphs | compile | run |",
        "|---|---|---|---|---|---|---|---|",
        *map(_kind_row, KINDS.values()),
    ]
    return f"{before}{begin}\n" + "\n".join(table) + f"\n{end}{after}"


def _kind_row(kind: DeviceKind) -> str:
    run = {"here": "here", "others": "by others", "never": "never"}[kind.evidence]
    devices = f"{kind.hardware}. {kind.note}" if kind.note else kind.hardware
    install = f"`{kind.install}`" if kind.install.startswith("pip") else kind.install
    way = f"{kind.backend}, through host memory" if kind.through_host else kind.backend
    graphs, compiles = ("yes" if able else "no" for able in (kind.graphs, kind.compiles))
    precisions = ", ".join(kind.precisions)
    return f"| `{kind.name}` | {devices} | {install} | {way} | {precisions} | {graphs} | {compiles} | {run} |"


def import_page(page: str) -> str:
    """Return the how-to page about other trainers with a generated table of keys for each."""
    before, begin, rest = page.partition("<!-- keys")
    mark, _, rest = rest.partition("\n")
    _, end, after = rest.partition("<!-- end of keys -->")
    lines = [line for tool in tools().values() for line in _tool_lines(tool)]
    return f"{before}{begin}{mark}\n" + "\n".join(lines) + f"\n{end}{after}"


def _tool_lines(tool: Tool) -> list[str]:
    def keys(found: typing.Iterable[str]) -> str:
        return ", ".join(f"`{key}`" for key in found)

    rows = [f"| {keys([key])} | {target} |" for key, target in {**tool.sets, **tool.adapter}.items()]
    for key, entries in tool.words.items():
        values = [f"{value}: {_settings(found)}" for value, found in entries.items() if isinstance(found, dict)]
        rows.append(f"| {keys([key])} | {'; '.join(values)} |")
    rows += [f"| {keys([key])} | {text} |" for key, text in tool.code.items()]
    reasons: dict[str, list[str]] = {}
    for key, text in tool.nothing.items():
        reasons.setdefault(f"no effect: {text}", []).append(key)
    for key, (text, _) in tool.missing.items():
        reasons.setdefault(f"not supported: {text}", []).append(key)
    rows += [f"| {keys(found)} | {text} |" for text, found in reasons.items()]
    return ["", f"### {tool.title}", "| keys | here |", "|---|---|", *rows]


def _settings(found: dict[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in found.items()) or "the same here"


def recipes_page() -> str:
    """Return the page of the configs in configs/tune, with what each trains and under which plan."""
    lines = [
        NOTE,
        "# Recipes",
        "A test plans each config of [`configs/tune/`](../../configs/tune): its plan fits on the GPUs in its name.",
        "```text",
        "weft train configs/tune/qwen3_4b_lora_rtx4090.toml model.path=Qwen3-4B data.train=chats.jsonl",
        "```",
        "",
        "| recipe | trains | tokens | batch | learning rate | plan |",
        "|---|---|---|---|---|---|",
    ]
    for file in sorted(RECIPES.glob("*.toml")):
        config = load_config(file).config
        title = file.read_text().partition("\n")[0].removeprefix("# ").removesuffix(".")
        train = config.train
        numbers = f"{train.seq_len} | {train.global_batch} | {config.optimizer.lr:g}"
        lines.append(f"| [`{file.stem}`](../../configs/tune/{file.name}) | {title} | {numbers} | `{config.plan}` |")
    return "\n".join(lines) + "\n"


def nav() -> list[typing.Any]:
    """Return the nav of the docs site, with the pages that match its patterns."""
    return expanded(yaml.load((DOCS.parent / "mkdocs.yml").read_text(), yaml.BaseLoader)["nav"])


def page_list() -> str:
    """Return the pages of the docs site for users, with their titles, by section of the site."""
    lines = []
    for section in nav():
        [(title, entries)] = section.items()
        pages = [DOCS / page for page in pages_in(entries) if page != "README.md" and (DOCS / page).is_file()]
        if title != "Contributing":
            links = [f"[{_title(page)}]({page.relative_to(DOCS).as_posix()})" for page in pages]
            lines.append(f"- **{title}**: " + " · ".join(links))
    return "\n".join(lines)


def _title(page: Path) -> str:
    return page.read_text().partition("# ")[2].partition("\n")[0]


def plan_answer() -> str:
    """Return the planner's answer to PLAN_COMMAND as a block of code, without the time of the search.

    The answer uses no measurements of this machine.
    """
    with tempfile.TemporaryDirectory() as home:
        words = [sys.executable, "-m", *PLAN_COMMAND.split()]
        environment = {**os.environ, "WEFT_HOME": home, "COLUMNS": "160"}  # noqa: TID251 (a child's environment)
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    answer = "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())
    return f"```\n$ {PLAN_COMMAND}\n" + re.sub(r"(estimated) in [\d.]+ m?s", r"\1", answer) + "\n```"


def with_answer(page: str, answer: str) -> str:
    """Return a page with the planner's answer in the block that begins with PLAN_COMMAND."""
    before, begin, rest = page.partition(f"```\n$ {PLAN_COMMAND}\n")
    return before + answer + rest.partition("```")[2] if begin else page


def with_pages(page: str) -> str:
    """Return the front page with its list of pages."""
    before, begin, rest = page.partition("<!-- pages -->")
    _, end, after = rest.partition("<!-- end of pages -->")
    return f"{before}{begin}\n{page_list()}\n{end}{after}"


PAGES = {
    "rules.md": rules_page,
    "settings.md": settings_page,
    "recipes.md": recipes_page,
    "benchmarks.md": benchmarks_page,
}

if __name__ == "__main__":
    for file_name, page in PAGES.items():
        (REFERENCE / file_name).write_text(page())
        print(REFERENCE / file_name)
    for path, page_of in ((DEEPSPEED, deepspeed_page), (DEVICES, devices_page), (TRAINERS, import_page)):
        path.write_text(page_of(path.read_text()))
        print(path)
    made = plan_answer()
    for path in (FRONT, DOCS / "how-to" / "plan.md"):
        path.write_text(with_answer(path.read_text(), made))
        print(path)
    FRONT.write_text(with_pages(FRONT.read_text()))
