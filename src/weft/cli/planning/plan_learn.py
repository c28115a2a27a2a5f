"""`weft plan --learn RUN`: teach a profile what a finished run measured."""

from __future__ import annotations

from pathlib import Path

from weft.cli.console import say
from weft.planner.measured import default_path, learn, lesson_words, load_profile


def learn_from(run: Path, path: Path | None) -> None:
    """Write the profile anew, with the run in it; say what changed. Raises ConfigError."""
    path = path or default_path()
    profile = learn(run, load_profile(path))
    told = ", ".join(f"{part} x {ratio:.2f}" for part, ratio in profile.learned[-1].ratios) or (
        "no factor worth learning"
    )
    profile.save(path)
    say(f"{run} measured over planned: {told}")
    say(f"{path}: from now on {lesson_words(profile) or 'as it was measured'}")
