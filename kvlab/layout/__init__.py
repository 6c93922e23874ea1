"""The size of KV caches in exact bytes, and the cost of models. Pure arithmetic, no torch."""

from kvlab.layout.kv_layout import KVLayout
from kvlab.layout.rescaling import RESCALE_PRESETS, RescaleError, rescale
from kvlab.layout.serving_estimate import ServingEstimate, estimate_serving
from kvlab.layout.training_memory import training_peak_bytes
from kvlab.spec.flops import (
    decode_flops,
    forward_flops,
    parameter_count,
    training_flops,
    weight_bytes_read,
)

__all__ = [
    "RESCALE_PRESETS",
    "KVLayout",
    "RescaleError",
    "ServingEstimate",
    "decode_flops",
    "estimate_serving",
    "forward_flops",
    "parameter_count",
    "rescale",
    "training_flops",
    "training_peak_bytes",
    "weight_bytes_read",
]
