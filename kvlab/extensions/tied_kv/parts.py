"""What one tensor for K and V adds to kvlab."""

from kvlab.own_extensions import Parts

PARTS = Parts(
    members={
        "kv_forms": {
            "tied": ".arithmetic:TIED",
            "rotated_tied": ".arithmetic:ROTATED_TIED",
            "grouped_tied": ".arithmetic:GROUPED_TIED",
        }
    },
    training_code=(".arithmetic", ".views"),
    measurement_code=(".arithmetic", ".views"),
)
