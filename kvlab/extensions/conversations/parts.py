"""What conversations add to kvlab."""

from kvlab.own_extensions import Parts, SectionPart

PARTS = Parts(
    fields={"benchmark": ".config:ConversationsFields", "measurement": ".config:ReuseFields"},
    members={
        "measures": {"conversations": ".config:MEASURE"},
        "line_keys": {"turn": "", "budget_bytes": ""},
        "report_anchors": {"reuse_": "reuse-between-turns"},
        "tracked_groups": {"reuse": "reuse_"},
    },
    sections=(SectionPart("reuse", "serving-gap", ".section:report_reuse", False),),
    measurement_code=(".config", ".load", ".measure", ".prefix_cache", ".turns"),
)
