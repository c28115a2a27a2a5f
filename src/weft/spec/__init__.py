"""What the user says, as pure data without torch: plan and rules, model shape, cluster, layout, config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "COMPRESSES",
    "ClusterSpec",
    "DecoderSpec",
    "DeviceSpec",
    "GATHERS",
    "Layout",
    "ModelSpec",
    "RunConfig",
    "Style",
    "TracedModel",
    "WIRES",
    "WireSpec",
    "common_divisors",
    "decoder_spec",
    "resolve_decoder",
    "wire_spec",
]

if TYPE_CHECKING:
    from weft.spec.cluster import ClusterSpec, DeviceSpec
    from weft.spec.config import RunConfig
    from weft.spec.divisors import common_divisors
    from weft.spec.layout import Layout, Style
    from weft.spec.model import DecoderSpec, ModelSpec, decoder_spec, resolve_decoder
    from weft.spec.traced import TracedModel
    from weft.spec.wires import COMPRESSES, GATHERS, WIRES, WireSpec, wire_spec

__getattr__ = loads(
    __name__,
    {
        "COMPRESSES": ".wires",
        "ClusterSpec": ".cluster",
        "DecoderSpec": ".model",
        "DeviceSpec": ".cluster",
        "GATHERS": ".wires",
        "Layout": ".layout",
        "ModelSpec": ".model",
        "RunConfig": ".config",
        "Style": ".layout",
        "TracedModel": ".traced",
        "WIRES": ".wires",
        "WireSpec": ".wires",
        "common_divisors": ".divisors",
        "decoder_spec": ".model",
        "resolve_decoder": ".model",
        "wire_spec": ".wires",
    },
)
