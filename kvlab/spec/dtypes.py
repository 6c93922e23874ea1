"""Bytes of one stored number, by dtype name."""

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1}

QUANTIZED = frozenset({"int8", "fp8"})
"""Stored with one scale for each token and head of K, and one for V."""

SCALE_BYTES = 2
"""A scale is a float16."""

MODEL_DTYPE = "float32"
"""The dtype of a trial's parameters, and of its cache where ``kv_dtype`` is ``model``."""
