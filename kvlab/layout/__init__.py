"""The size of KV caches in exact bytes, and the cost of models. Pure arithmetic, no torch."""

from kvlab.layout.kv_layout import KVLayout as KVLayout
from kvlab.layout.roofline_model import decode_flops as decode_flops
from kvlab.layout.training_memory import training_peak_bytes as training_peak_bytes
from kvlab.spec.flops import forward_flops as forward_flops
from kvlab.spec.flops import parameter_count as parameter_count
from kvlab.spec.flops import training_flops as training_flops
