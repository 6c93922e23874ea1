"""What the measure of the largest batch adds to kvlab."""

from kvlab.own_extensions import Parts, SectionPart

PARTS = Parts(
    fields={"benchmark": ".config:LimitFields"},
    problems=".config:find_problems",
    members={"measures": {"limit": ".config:MEASURE"}},
    sections=(SectionPart("limit", "roofline", ".section:report_limit", False),),
    measurement_code=(".max_batch_search", ".measure"),
)
