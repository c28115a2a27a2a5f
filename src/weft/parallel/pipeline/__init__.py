"""Pipelines: a model cut into stages along its chain of blocks, and the loop that carries out a schedule."""

from __future__ import annotations

from weft.parallel.pipeline.runtime import CountedLoss, Inside, Pipeline, StepWork, build_pipeline, pipeline_of

__all__ = [
    "CountedLoss",
    "Inside",
    "Pipeline",
    "StepWork",
    "build_pipeline",
    "pipeline_of",
]
