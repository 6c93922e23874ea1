"""What one tensor for K and V adds to kvlab."""

from kvlab.own_extensions import Parts

_FORMS, _VIEWS = "kvlab.extensions.tied_kv.arithmetic", "kvlab.extensions.tied_kv.views"

PARTS = Parts(
    members={
        "kv_forms": {
            "tied": f"{_FORMS}:TIED",
            "rotated_tied": f"{_FORMS}:ROTATED_TIED",
            "grouped_tied": f"{_FORMS}:GROUPED_TIED",
        }
    },
    training_code=(_FORMS, _VIEWS),
    measurement_code=(_FORMS, _VIEWS),
)
