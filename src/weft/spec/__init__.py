"""What the user says, as pure data without torch: plan and rules, model shape, cluster, layout, config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "ClusterSpec",
    "DecoderSpec",
    "DeviceSpec",
    "Layout",
    "Limit",
    "ModelSpec",
    "RunConfig",
    "Style",
    "TracedModel",
    "common_divisors",
    "decoder_spec",
    "device_by_torch_name",
    "devices",
    "model_names",
    "resolve_decoder",
    "shares",
]

if TYPE_CHECKING:
    from weft.spec import shares
    from weft.spec.cluster import ClusterSpec, DeviceSpec, device_by_torch_name, devices
    from weft.spec.config import RunConfig
    from weft.spec.decoder import DecoderSpec
    from weft.spec.divisors import common_divisors
    from weft.spec.layout import Layout, Style
    from weft.spec.model import ModelSpec, decoder_spec, model_names, resolve_decoder
    from weft.spec.traced import Limit, TracedModel

__getattr__ = loads(
    __name__,
    {
        "ClusterSpec": ".cluster",
        "DecoderSpec": ".model",
        "DeviceSpec": ".cluster",
        "Layout": ".layout",
        "Limit": ".traced",
        "ModelSpec": ".model",
        "RunConfig": ".config",
        "Style": ".layout",
        "TracedModel": ".traced",
        "common_divisors": ".divisors",
        "decoder_spec": ".model",
        "device_by_torch_name": ".cluster",
        "devices": ".cluster",
        "model_names": ".model",
        "resolve_decoder": ".model",
    },
)
