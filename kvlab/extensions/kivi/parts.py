"""What KIVI adds to kvlab."""

from kvlab.own_extensions import Parts

_FOLDER = "kvlab.extensions.kivi"
_CODE = tuple(f"{_FOLDER}.{name}" for name in ("config", "buffers", "training_pass"))

PARTS = Parts(
    fields={
        "serving": f"{_FOLDER}.config:ServingFields",
        "training": f"{_FOLDER}.config:TrainingFields",
    },
    members={
        "kv_dtypes": {"kivi4": f"{_FOLDER}.config:KIVI4", "kivi2": f"{_FOLDER}.config:KIVI2"},
        "slot_plans": {"kivi": f"{_FOLDER}.slots:plan_slot"},
    },
    training_code=_CODE,
    measurement_code=(*_CODE, f"{_FOLDER}.slots"),
)
