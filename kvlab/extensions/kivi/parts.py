"""What KIVI adds to kvlab."""

from kvlab.own_extensions import Parts

_CODE = (".config", ".buffers", ".training_pass")

PARTS = Parts(
    fields={"serving": ".config:ServingFields", "training": ".config:TrainingFields"},
    members={
        "kv_dtypes": {"kivi4": ".config:KIVI4", "kivi2": ".config:KIVI2"},
        "slot_plans": {"kivi": ".slots:plan_slot"},
    },
    training_code=_CODE,
    measurement_code=(*_CODE, ".slots"),
)
