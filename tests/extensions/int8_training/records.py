"""A made record of trials that trained in int8."""

from tests.support.record_factory import Record


class QuantizedTrainingRecord(Record):
    """int8 products cost 0.02 and save a fifth of the memory; they are faster in gelu alone.
    The trial of all products in swiglu at the last seed failed."""

    def __init__(self, **changes):
        factors = {"mlp": ("gelu", "swiglu"), "int8": ("none", "all")}
        effects = {"all": 0.02, "swiglu": -0.01}
        super().__init__(**{"factors": factors, "effects": effects, "noise": 0.0, **changes})

    def measurements(self, levels, seed):
        is_int8, is_gelu = levels["int8"] == "all", levels["mlp"] == "gelu"
        rate = 1000.0 + 10 * seed
        return {
            **super().measurements(levels, seed),
            "training_tokens_per_second": rate * ((1.5 if is_gelu else 0.75) if is_int8 else 1),
            "training_peak_bytes": (4 if is_int8 else 5) * 2**20,
        }

    def result(self, levels, seed, status):
        found = super().result(levels, seed, status)
        products = ["output", "grad_weight"] if levels["int8"] == "all" else []
        found["experiment"]["model"]["mlp"] = levels["mlp"]
        found["experiment"]["training"]["int8"] = products
        if products and status == "done":
            found["training_record"]["int8"] = {
                "kernel": "float32", "products": products, "layers": 4, "weights": "none",
            }  # fmt: skip
        return found


RECORD = QuantizedTrainingRecord()
