"""What gated linear attention adds to kvlab."""

from kvlab.own_extensions import Parts

_CODE = (".arithmetic", ".delta_rule", ".gated_delta")

PARTS = Parts(
    members={"mixers": {"gated_delta": ".arithmetic:MIXER"}},
    training_code=_CODE,
    measurement_code=_CODE,
)
