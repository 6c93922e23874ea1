"""What gated linear attention adds to kvlab."""

from kvlab.own_extensions import Parts

_FOLDER = "kvlab.extensions.linear_attention"
_CODE = tuple(f"{_FOLDER}.{name}" for name in ("arithmetic", "delta_rule", "gated_delta"))

PARTS = Parts(
    members={"mixers": {"gated_delta": f"{_FOLDER}.arithmetic:MIXER"}},
    training_code=_CODE,
    measurement_code=_CODE,
)
