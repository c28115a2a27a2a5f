"""RunConfig, section by section: one training run as typed data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "AdapterSection",
    "AlertSection",
    "ChannelSection",
    "DataSection",
    "ModelSection",
    "OptimizerGroup",
    "OptimizerSection",
    "RunConfig",
    "STDLIB_SOURCE",
    "SinkSection",
    "SampleSection",
    "ScheduleSection",
    "SourceSection",
    "TRAINS",
    "changed_keys",
    "value_at",
]

if TYPE_CHECKING:
    from weft.spec.config.adapter_section import AdapterSection
    from weft.spec.config.changes import changed_keys, value_at
    from weft.spec.config.monitor_sections import AlertSection, ChannelSection, SinkSection
    from weft.spec.config.optimizer_sections import OptimizerGroup, OptimizerSection, ScheduleSection
    from weft.spec.config.run_config import (
        STDLIB_SOURCE,
        DataSection,
        ModelSection,
        RunConfig,
        SampleSection,
        SourceSection,
    )
    from weft.spec.config.setting_types import TRAINS

__getattr__ = loads(
    __name__,
    {
        "AdapterSection": ".adapter_section",
        "AlertSection": ".monitor_sections",
        "ChannelSection": ".monitor_sections",
        "SinkSection": ".monitor_sections",
        "DataSection": ".run_config",
        "ModelSection": ".run_config",
        "OptimizerGroup": ".optimizer_sections",
        "OptimizerSection": ".optimizer_sections",
        "RunConfig": ".run_config",
        "STDLIB_SOURCE": ".run_config",
        "SampleSection": ".run_config",
        "ScheduleSection": ".optimizer_sections",
        "SourceSection": ".run_config",
        "TRAINS": ".setting_types",
        "changed_keys": ".changes",
        "value_at": ".changes",
    },
)
