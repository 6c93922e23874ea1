"""What training in int8 adds to kvlab."""

from kvlab.own_extensions import Parts, SectionPart

_SECTION = "kvlab.extensions.int8_training.section"
_CONFIG, _CODE = "kvlab.extensions.int8_training.config", "kvlab.extensions.int8_training.int8"

PARTS = Parts(
    fields={"training": f"{_CONFIG}:Int8Fields"},
    members={
        "linear_products": {"int8": f"{_CODE}:make_products"},
        "linear_input_bytes": {"int8": f"{_CONFIG}:find_input_bytes"},
    },
    sections=(
        SectionPart("quantized-training", "serving-gap", f"{_SECTION}:report_quantized_training"),
    ),
    training_code=(_CONFIG, _CODE),
)
