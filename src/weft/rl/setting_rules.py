"""Rules of the settings and plans of `task.name = "grpo"`, and the import of users' functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.config.sections import GrpoSection
from weft.errors import ConfigError, Problem
from weft.lazy import named_object
from weft.train.tasks.base import setting_error


def check_settings(config: RunConfig) -> None:
    """Raise ConfigError for settings that do not fit together."""
    grpo, train = config.grpo, config.train
    rules: list[tuple[bool, str, object, str]] = [
        (train.global_batch % grpo.completions > 0, "train.global_batch", train.global_batch,
         f"it counts completions, {grpo.completions} of each prompt. Use a multiple of {grpo.completions}."),
        (grpo.completions < 2 and grpo.method != "distill", "grpo.completions", grpo.completions,
         f"{grpo.method} compares the completions of a prompt. Use 2 or more."),
        (not grpo.reward and grpo.method != "distill", "grpo.reward", '""',
         f"{grpo.method} learns from rewards. Give a function, such as rewards.py:correct."),
        (bool(grpo.reward_weights) and len(grpo.reward_weights) != len(grpo.reward), "grpo.reward_weights",
         list(grpo.reward_weights), f"there are {len(grpo.reward)} reward functions. Give one weight for each."),
        (len({one.rpartition(":")[2] for one in grpo.reward}) < len(grpo.reward), "grpo.reward", list(grpo.reward),
         "two functions have the same name, and metrics could not tell them apart. Rename one."),
        ((grpo.method == "distill") != bool(grpo.teacher), "grpo.teacher", grpo.teacher or '""',
         "method=distill needs a teacher, and other methods use none. Set both, or neither."),
        (grpo.method == "distill" and grpo.beta > 0, "grpo.beta", grpo.beta,
         "distill already follows its teacher. Leave it out."),
        (bool(grpo.engine) != bool(grpo.engine_folder), "grpo.engine_folder", grpo.engine_folder or '""',
         "an engine reads its weights from a folder, and without one none is written. Set both, or neither."),
        (bool(grpo.engine and grpo.top_k), "grpo.top_k", grpo.top_k,
         "an engine's log probabilities are of the tokens that are left, and the loss's of all. Leave it out."),
        (bool(grpo.engine) and grpo.top_p < 1, "grpo.top_p", grpo.top_p,
         "an engine's log probabilities are of the tokens that are left, and the loss's of all. Leave it out."),
        (grpo.method == "distill" and grpo.ratio == "sequence", "grpo.ratio", grpo.ratio,
         "the tokens of a completion have different advantages under method=distill. Use ratio=token."),
        (bool(grpo.engine) and not config.model.path, "grpo.engine", grpo.engine,
         "engines serve Hugging Face models, and this is a decoder of Weft. Leave it out, or use model.path."),
        (grpo.max_tokens > train.seq_len, "grpo.max_tokens", grpo.max_tokens,
         f"with its prompt, a completion has at most train.seq_len + 1 tokens. Use at most {train.seq_len}."),
        (bool(config.data.eval), "data.eval", "(files)", "grpo does not evaluate. Leave it out."),
        (config.data.stream, "data.stream", "true", "all prompts are read first. Leave it out."),
        (config.data.packing is not None, "data.packing", config.data.packing,
         "completions are not packed: a row has one. Leave it out."),
        (config.tokenizer.kind == "bpe" and not config.model.path, "tokenizer.kind", "bpe",
         "prompts are too few to train a tokenizer. Use file or bytes, or model.path."),
    ]  # fmt: skip
    problems = [Problem.of(key, value, rule) for is_wrong, key, value, rule in rules if is_wrong]
    if problems:
        raise ConfigError(problems)


def check_plan(plan: Plan) -> None:
    """Raise ConfigError for plans whose steps could not sample or report."""
    for field, usual in (("sync", "step"), ("graphs", False)):
        if (value := getattr(plan, field)) != usual:
            raise setting_error(f"plan.{field}", value, "task=grpo does not support it. Leave it out.")


def check_functions(settings: GrpoSection) -> None:
    """Raise ConfigError if a reward function or the rollout function cannot be imported or called."""
    for source in settings.reward:
        user_function("grpo.reward", source)
    if settings.rollout:
        user_function("grpo.rollout", settings.rollout)


def user_function(key: str, source: str) -> Callable[..., Any]:
    """Return a user's function. Raise ConfigError if it cannot be imported or called."""
    try:
        found = named_object(source)
    except Exception as error:  # user code may raise anything
        why = f"{type(error).__name__}: {error}"
        raise setting_error(key, source, f"it cannot be imported ({why}). Give a function as file.py:name.") from error
    if not callable(found):
        raise setting_error(key, source, f"it is a {type(found).__name__}. Give a function.")
    return found
