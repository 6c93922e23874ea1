"""What the measure of the largest batch adds to kvlab."""

from kvlab.own_extensions import Parts

_FOLDER = "kvlab.extensions.limit"

PARTS = Parts(
    fields={"benchmark": f"{_FOLDER}.config:LimitFields"},
    problems=f"{_FOLDER}.config:find_problems",
    members={"measures": {"limit": f"{_FOLDER}.config:MEASURE"}},
    measurement_code=(f"{_FOLDER}.max_batch_search", f"{_FOLDER}.measure"),
)
