"""Who caches what, in exact bytes, and what a model costs. Pure arithmetic, no torch."""

from kvlab.layout.cost import (
    decode_flops,
    forward_flops,
    parameter_count,
    training_flops,
    weight_bytes_read,
)
from kvlab.layout.dtypes import ITEM_BYTES, QUANTISED, SCALE_BYTES
from kvlab.layout.estimate import Estimate, estimate
from kvlab.layout.kv_layout import KVLayout
from kvlab.layout.training_memory import training_peak_bytes
from kvlab.layout.transfer import SIZES, TransferError, transfer

__all__ = [
    "ITEM_BYTES",
    "QUANTISED",
    "SCALE_BYTES",
    "SIZES",
    "Estimate",
    "KVLayout",
    "TransferError",
    "decode_flops",
    "estimate",
    "forward_flops",
    "parameter_count",
    "training_flops",
    "training_peak_bytes",
    "transfer",
    "weight_bytes_read",
]
