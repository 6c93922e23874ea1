"""What training in int8 adds to kvlab."""

from kvlab.own_extensions import Parts, SectionPart

PARTS = Parts(
    fields={"training": ".config:Int8Fields"},
    members={
        "linear_products": {"int8": ".int8:make_products"},
        "linear_input_bytes": {"int8": ".config:find_input_bytes"},
    },
    sections=(
        SectionPart("quantized-training", "serving-gap", ".section:report_quantized_training"),
    ),
    training_code=(".config", ".int8"),
)
