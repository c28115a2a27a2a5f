"""A config of Weft for a chosen plan: what `weft plan --out` writes and `weft train` runs."""

from __future__ import annotations

from weft.errors import ConfigError, ModelError
from weft.planner.search import Candidate
from weft.spec import DecoderSpec, decoder_spec
from weft.spec.model import model_names

#: Fields of the model's section that say its shape.
_SHAPE_FIELDS = ("family", "vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "max_seq_len",
                 "tied", "rope_theta", "norm_eps")  # fmt: skip


def config_text(one: Candidate) -> str:
    """Return the config as TOML, with the figures that were expected as a comment.

    Raises:
        ModelError: for a model that `weft train` cannot build.
        ConfigError: where a rule refuses the config.
    """
    from weft.spec import RunConfig
    from weft.spec.files import format_config
    from weft.spec.rules import config_problems
    from weft.units import format_bytes, format_count, format_seconds

    question = one.question
    base = question.model.config or RunConfig.model_validate({"model": _model_table(one)})
    tables = base.model_dump(by_alias=True, exclude_none=True)
    tables["plan"] = one.plan.format()
    tables["train"]["global_batch"] = question.job.global_batch
    if question.model.traced is None:
        tables["train"]["seq_len"] = question.job.seq_len
    if question.model.config is None:
        tables["run"] |= {"name": question.model.name}
    config = RunConfig.model_validate(tables)
    problems = config_problems(config, world_size=question.cluster.num_devices)
    if problems:
        raise ConfigError(problems)
    expected = (
        f"# Chosen by `weft plan` for {question.model.name} on {question.cluster}. Expected: "
        f"{format_seconds(one.step_s)} a step, {format_count(one.tokens_per_s)} {question.unit}/s, "
        f"{format_bytes(one.total_bytes)} of {format_bytes(one.usable_bytes)} on each rank.\n"
    )
    return expected + format_config(config)


def _model_table(one: Candidate) -> dict[str, object]:
    model = one.question.model
    if model.traced is not None:
        rule = "`weft train` builds models from configs, not from code. Leave out --out"
        raise ModelError(f'model={model.name}: {rule}, and write weft.init("{one.plan}") in your script.')
    if model.name in model_names() and decoder_spec(model.name) == model.spec:
        return {"name": model.name}
    shape = model.shape
    unknown = [
        word
        for word, there in (
            ("experts", shape.num_experts > 0),
            ("a sliding window", shape.window > 0),
            ("latent attention", shape.kv_rank > 0),
            ("heads whose width is not dim / heads", shape.head_dim * shape.heads != shape.hidden),
        )
        if there
    ]
    if unknown:
        rule = f"`weft train` builds no model with {' and '.join(unknown)} from a config. Leave out --out"
        raise ModelError(f"model={model.name}: {rule}; the plan itself can be used in weft.init.")
    return {"name": _nearest_size(model.spec), **{name: getattr(model.spec, name) for name in _SHAPE_FIELDS}}


def _nearest_size(spec: DecoderSpec) -> str:
    """A named size of the same family, from which the config differs in every field that is given."""
    return next(name for name in model_names() if decoder_spec(name).family == spec.family)
