"""The options of `task.name = "recommend"`, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.errors import ConfigError, Problem, did_you_mean
from weft.recommend.columns import ColumnSchema, parse_columns

POINTWISE = ("dlrm", "deepfm")
MODELS = (*POINTWISE, "two_tower", "sasrec")
SPLITS = ("random", "time", "last")


@dataclass(eq=False)
class RecommendOptions:
    """Records, model and evaluation of a recommender.

    Attributes:
        columns: the columns that the model reads, such as ["user=id", "item=id", "rating=label>=4"].
        model: dlrm, deepfm, two_tower or sasrec.
        split: records that are held out: random (a share, by a hash of the content), time (the latest share), or last
            (each user's last item, only for sasrec). "" for random, and last for sasrec.
        user, item: columns of the user and of the item for two_tower and sasrec. The first one is the id.
        dim: width of embeddings.
        hidden: hidden widths of the MLPs.
        dropout: rate of dropout.
        temperature: divides the cosines of two_tower.
        corrects: subtract the logarithm of an item's frequency from the scores of two_tower.
        length: longest sequence of sasrec.
        layers, heads: blocks and attention heads of sasrec.
        negatives: negative items for each position of sasrec; 0 compares with all items.
        k: values of k of recall@k and NDCG@k.

    Raises:
        ConfigError: for options that are out of range or do not fit together.
    """

    columns: tuple[str, ...]
    model: str = "deepfm"
    split: str = ""
    user: tuple[str, ...] = ()
    item: tuple[str, ...] = ()
    dim: int = 16
    hidden: tuple[float, ...] = (64, 32)
    dropout: float = 0.0
    temperature: float = 0.1
    corrects: bool = True
    length: int = 50
    layers: int = 2
    heads: int = 2
    negatives: int = 0
    k: tuple[float, ...] = (10,)

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            hint = did_you_mean(self.model, MODELS) or f" Use {', '.join(MODELS)}."
            raise _refused("model", self.model, f"there is no such model.{hint}")
        self.split = self.split or ("last" if self.model == "sasrec" else "random")
        if self.split not in SPLITS or (self.split == "last") != (self.model == "sasrec"):
            right = "last" if self.model == "sasrec" else "random or time"
            raise _refused("split", self.split, f"{self.model} is evaluated on split={right}. Use that.")
        self.schema = ColumnSchema(parse_columns(_listed(self.columns)), _listed(self.user), _listed(self.item))
        _check_numbers(self)
        _check_columns(self)

    @property
    def is_pointwise(self) -> bool:
        """True if the model predicts the label of a record, and does not rank items."""
        return self.model in POINTWISE


def _listed(names: Any) -> tuple[str, ...]:
    """Return an option as a tuple: a list of texts, or one text with commas."""
    return tuple(one.strip() for one in names.split(",") if one.strip()) if isinstance(names, str) else tuple(names)


def _refused(option: str, value: object, rule: str) -> ConfigError:
    return ConfigError([Problem(f"task.options.{option}", f"task.options.{option}={value}: {rule}")])


def _check_numbers(options: RecommendOptions) -> None:
    ranges = {"dim": (1, 2**16), "dropout": (0.0, 0.99), "length": (2, 2**16), "negatives": (0, 2**16)}
    for name, (least, most) in ranges.items():
        if not least <= getattr(options, name) <= most:
            raise _refused(name, getattr(options, name), f"it is {least:g} to {most:g}. Use a number between.")
    if options.temperature <= 0:
        raise _refused("temperature", options.temperature, "a temperature is above 0. Use 0.1.")
    for name in ("hidden", "k"):
        value = getattr(options, name)
        if not isinstance(value, tuple | list) or any(
            isinstance(one, str) or one < 1 or one != round(one) for one in value
        ):
            raise _refused(name, value, "it is a list of whole numbers from 1. Write e.g. [64, 32].")
    if not options.k:
        raise _refused("k", "[]", "at least one value of k is needed. Write e.g. [10].")


def _check_columns(options: RecommendOptions) -> None:
    schema, model, columns = options.schema, options.model, ", ".join(_listed(options.columns))
    for kind in ("label", "time"):
        if len(schema.of_kind(kind)) > 1:
            raise _refused("columns", columns, f"there are two columns of kind {kind}. Keep one.")
    if options.split != "random" and schema.time is None:
        raise _refused("split", options.split, "it needs the time of records. Add a column such as timestamp=time.")
    if options.is_pointwise:
        if schema.label is None:
            raise _refused("columns", columns, f"{model} needs a label. Add a column such as rating=label>=4.")
        if not any(one.has_ids for one in schema.columns):
            raise _refused("columns", columns, f"{model} needs a column of ids. Add one such as item=id.")
        for name in ("user", "item"):
            if value := getattr(schema, name):
                raise _refused(name, ",".join(value), f"{model} reads all columns together. Leave it out.")
        return
    for name in ("user", "item"):
        own = [schema.named(one) for one in getattr(schema, name)]
        if not own:
            raise _refused(name, "", f'{model} needs the columns of the {name}. Write e.g. {name}=["{name}_id"].')
        if own[0].kind != "id" or not own[0].learns:
            text = f"{own[0].name}={own[0].kind}"
            rule = f"the first column is the {name}'s id, with a learned vocabulary, and not {text}."
            raise _refused(name, own[0].name, f"{rule} Write {own[0].name}=id in columns.")
    _check_roles(options)


def _check_roles(options: RecommendOptions) -> None:
    """Check that each column belongs to the user or the item, and that sasrec has the ids only."""
    schema = options.schema
    both = set(schema.user) & set(schema.item)
    if both:
        raise _refused(
            "item", ",".join(schema.item), f"the column {min(both)!r} is also one of the user. Name it once."
        )
    roles = {*schema.user, *schema.item}
    for one in schema.columns:
        if one.kind not in ("label", "time") and one.name not in roles:
            raise _refused(
                "columns", one.name, "the column is neither in user nor in item. Name it in one, or leave it out."
            )
    if options.model == "sasrec" and (more := [*schema.user[1:], *schema.item[1:]]):
        raise _refused("columns", more[0], "sasrec reads the ids of users and items only. Leave it out.")
