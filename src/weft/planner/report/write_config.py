"""Weft config for a chosen plan: written by `weft plan --out`, read by `weft train`."""

from __future__ import annotations

from typing import Any

from weft.config.shapes.model_spec import decoder_spec, model_names
from weft.errors import ConfigError, ModelError
from weft.planner.search.candidate import Candidate
from weft.units import format_bytes, format_count, format_seconds

#: Fields of the [model] section that define the shape.
_SHAPE_FIELDS = ("family", "vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "max_seq_len",
                 "tied", "rope_theta", "norm_eps")  # fmt: skip

#: Prefix of lines with values that the user must fill in or check.
FILL_IN = "# fill in: "
#: Minimum number of entries of a trained tokenizer.
_LEAST_VOCAB = 300
#: Parameters from which adapters use a lower learning rate.
_LARGE = 3e10


def config_text(one: Candidate) -> str:
    """Return the config as TOML, with comments on the estimated values and on values that the user must check.

    Raises:
        ModelError: for a model that `weft train` cannot build.
        ConfigError: if a rule rejects the config.
    """
    from weft.config.files import format_config
    from weft.config.rules.config_rules import config_problems
    from weft.config.run_config import RunConfig

    question = one.question
    tuned = question.job.adapter is not None and question.model.folder is not None
    model = {"path": str(question.model.folder)} if tuned else None
    base = question.model.config or RunConfig.model_validate({"model": model or _model_table(one)})
    tables = base.model_dump(by_alias=True, exclude_none=True)
    tables["plan"] = one.plan.format()
    tables["train"]["global_batch"] = question.job.global_batch
    if question.model.traced is None:
        tables["train"]["seq_len"] = question.job.seq_len
    notes: list[str] = []
    if question.model.config is None:
        tables["run"] |= {"name": question.model.name}
        notes = _suit(tables, one)
    config = RunConfig.model_validate(tables)
    problems = config_problems(config, world_size=question.cluster.num_devices)
    if problems:
        raise ConfigError(problems)
    expected = (
        f"# Chosen by `weft plan` for {question.model.name} on {question.cluster}. Expected: "
        f"{format_seconds(one.step_s)} a step, {format_count(one.tokens_per_s)} {question.unit}/s, "
        f"{format_bytes(one.total_bytes)} of {format_bytes(one.usable_bytes)} on each rank.\n"
    )
    return expected + "".join(f"{FILL_IN}{note}\n" for note in notes) + format_config(config)


def _suit(tables: dict[str, Any], one: Candidate) -> list[str]:
    """Set the values in `tables` whose defaults suit only a small model on built-in text.

    Return notes on values that the user must check.
    """
    model, adapter = one.question.model, one.question.job.adapter
    tables["optimizer"]["lr"] = rate = learning_rate(model.shape.num_params, is_adapter=adapter is not None)
    steps = tables["train"]["steps"]
    read = format_count(steps * one.question.job.tokens).replace(" ", "")
    why = "usual for adapters of models of this size" if adapter else "for training from random weights, by size"
    notes = [
        "data.train is Weft's built-in text, which is there to try things. Name your own files.",
        f"optimizer.lr={rate:g} is {why}. To fine-tune all weights, use about a tenth.",
        f"train.steps={steps} is a trial: {read} tokens, {format_seconds(steps * one.step_s)}. weft plan ... --run "
        "tokens=1T shows the cost of more.",
    ]
    if adapter is not None:
        tables["adapter"] |= {"rank": adapter.rank, "base": adapter.base}
        notes[1] = f"optimizer.lr={rate:g} is {why}."
        if tables["model"].get("path"):
            return notes  # the model in the folder has its own tokenizer
        notes.append('model.path is empty, and an adapter needs a model to adapt. Name its folder: path = "folder".')
    if model.folder is not None and (model.folder / "tokenizer.json").is_file():
        tables["tokenizer"] |= {"kind": "file", "path": str(model.folder.resolve())}
    elif model.shape.vocab >= _LEAST_VOCAB:
        tables["tokenizer"]["vocab_size"] = model.shape.vocab
        notes.append(
            f"tokenizer: one of {model.shape.vocab:,} entries is trained on your data. If the model has its own, use "
            'kind = "file" and path = "folder".'
        )
    return notes


def learning_rate(num_params: float, *, is_adapter: bool) -> float:
    """Return a peak AdamW learning rate for a model's size, rounded to two digits.

    For random weights it is 3e-4 at 8 B parameters and falls with the cube root of the size. This matches Llama 3
    (arXiv 2407.21783, table 3: 3e-4 at 8 B, 1.5e-4 at 70 B, 8e-5 at 405 B). The maximum is Weft's default, 1e-3. For
    adapters it follows QLoRA (arXiv 2305.14314): 2e-4, and 1e-4 from 33 B on.
    """
    if is_adapter:
        return 2e-4 if num_params < _LARGE else 1e-4
    return float(f"{min(1e-3, 3e-4 * (8e9 / num_params) ** (1 / 3)):.1e}")


def _model_table(one: Candidate) -> dict[str, object]:
    model = one.question.model
    if model.traced is not None:
        rule = "`weft train` builds models from configs, not from code. Leave out --out"
        raise ModelError(f'model={model.name}: {rule}, and write weft.init("{one.plan}") in your script.')
    if model.name in model_names() and decoder_spec(model.name) == model.spec:
        return {"name": model.name}
    shape = model.shape
    features = {
        "experts": shape.num_experts > 0,
        "a sliding window": shape.window > 0,
        "latent attention": shape.kv_rank > 0,
        "heads whose width is not dim / heads": shape.head_dim * shape.heads != shape.hidden,
    }
    unknown = [word for word, there in features.items() if there]
    if unknown:
        rule = f"`weft train` builds no model with {' and '.join(unknown)} from a config. Leave out --out"
        raise ModelError(f"model={model.name}: {rule}; the plan itself can be used in weft.init.")
    # The named size of the same family, from which the config differs in the fewest fields.
    near = next(name for name in model_names() if decoder_spec(name).family == model.spec.family)
    return {"name": near, **{name: getattr(model.spec, name) for name in _SHAPE_FIELDS}}
