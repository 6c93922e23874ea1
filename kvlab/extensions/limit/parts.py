"""What the measure of the largest batch adds to kvlab."""

from kvlab.own_extensions import Parts

PARTS = Parts(
    fields={"benchmark": ".config:LimitFields"},
    problems=".config:find_problems",
    members={"measures": {"limit": ".config:MEASURE"}},
    measurement_code=(".max_batch_search", ".measure"),
)
