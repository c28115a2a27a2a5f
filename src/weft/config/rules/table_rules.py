"""Rules for configs whose layout shards embedding tables over the data ranks."""

from __future__ import annotations

from collections.abc import Callable

from weft.config.fields.layout import Layout
from weft.config.fields.plan_text import is_auto
from weft.config.rules.config_rule import ConfigRule, plan_of, shards_tables
from weft.config.run_config import RunConfig
from weft.config.table_plans import table_plan_problems
from weft.config.table_section import TableSection
from weft.errors import Problem


def _plan_problems(config: RunConfig) -> list[Problem]:
    if (found := plan_of(config)) is None:
        return []
    plan, open_axis = found
    return table_plan_problems(plan if open_axis is None else plan.replace(**{open_axis: 2}))


def _not_with_tables(name: str, key: str, predicate: Callable[[RunConfig], bool], why: str, remedy: str) -> ConfigRule:
    return ConfigRule(
        name=f"tables-{name}",
        keys=("layout", key),
        reason=f"If a layout shards embedding tables, {why}.",
        predicate=lambda config: shards_tables(config) and predicate(config),
        message=lambda config: (
            f"{config.layout}: it shards embedding tables, and {why}. {remedy}, or leave the tables out of layout."
        ),
    )


TABLE_RULES: tuple[ConfigRule, ...] = (
    ConfigRule(
        name="tables-fit-the-plan",
        keys=("layout", "plan"),
        reason="Embedding tables are built for data parallelism with zero up to 2, without the other techniques.",
        predicate=lambda config: shards_tables(config) and bool(_plan_problems(config)),
        message=lambda config: f"{config.layout}: plan.{_plan_problems(config)[0].message}",
    ),
    _not_with_tables("need-a-plan", "plan", lambda config: is_auto(config.plan), "the planner does not count them",
                     "Price the tables with weft plan CLUSTER --tables FILE and write the plan, such as "
                     "plan='dp_replicate=*'"),
    _not_with_tables("need-torch", "launch.engine", lambda config: config.launch.engine == "jax",
                     "the JAX engine does not know them", "Use launch.engine=torch"),
    _not_with_tables("have-no-adapter", "adapter.rank", lambda config: config.adapter.rank > 0,
                     "an adapter would freeze them", "Use adapter.rank=0"),
    _not_with_tables("have-no-averages", "optimizer.name",
                     lambda config: config.optimizer.name.endswith(":ScheduleFreeAdamW"),
                     "averages of schedule_free would change rows that a step does not read",
                     "Use optimizer.name=adamw"),
    ConfigRule(
        name="tables-are-in-the-layout",
        keys=(*(f"tables.{name}" for name in TableSection.model_fields), "layout"),
        reason="Without an embedding table in the layout, the settings of [tables] would do nothing.",
        predicate=lambda config: config.tables != TableSection() and not shards_tables(config),
        message=lambda config: (
            f"{config.tables.optimizer}: settings of [tables] are set, and layout shards no embedding table. Set "
            "layout, such as 'user=rows', or leave them out."
        ),
    ),
    ConfigRule(
        name="tables-on-the-host",
        keys=("tables.cache", "tables.folder", "layout"),
        reason="Only tables with style host (or auto) have a cache and mapped files.",
        predicate=lambda config: (
            (config.tables.cache, config.tables.folder) != (TableSection().cache, TableSection().folder)
            and shards_tables(config)
            and not {"host", "auto"} & {style for _, style in Layout.read(config.layout).pairs}
        ),
        message=lambda config: (
            f"{config.tables.cache}: tables.cache and tables.folder are for tables with style host, and layout has "
            "none. Set layout, such as 'user=host', or leave them out."
        ),
    ),
    ConfigRule(
        name="tables-decay-lazily",
        keys=("tables.weight_decay", "tables.optimizer"),
        reason="Only lazy_adamw decays the rows of tables.",
        predicate=lambda config: config.tables.weight_decay > 0 and config.tables.optimizer != "lazy_adamw",
        message=lambda config: (
            f"{config.tables.weight_decay}: tables.optimizer={config.tables.optimizer} does not decay rows. Use 0, or "
            "tables.optimizer=lazy_adamw."
        ),
    ),
)  # fmt: skip
