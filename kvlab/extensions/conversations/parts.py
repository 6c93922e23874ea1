"""What conversations add to kvlab."""

from kvlab.own_extensions import Parts, SectionPart

_FOLDER = "kvlab.extensions.conversations"

PARTS = Parts(
    fields={
        "benchmark": f"{_FOLDER}.config:ConversationsFields",
        "measurement": f"{_FOLDER}.config:ReuseFields",
    },
    members={
        "measures": {"conversations": f"{_FOLDER}.config:MEASURE"},
        "line_keys": {"turn": "", "budget_bytes": ""},
        "report_anchors": {"reuse_": "reuse-between-turns"},
        "tracked_groups": {"reuse": "reuse_"},
        "generate_examples": {
            "3f2a --chat --show-reuse": "a conversation, with what turns take over"
        },
        "generate_modes": {"chat": f"{_FOLDER}.chat"},
    },
    sections=(SectionPart("reuse", "serving-gap", f"{_FOLDER}.section:report_reuse", False),),
    measurement_code=(
        f"{_FOLDER}.config", f"{_FOLDER}.load", f"{_FOLDER}.measure", f"{_FOLDER}.prefix_cache",
        f"{_FOLDER}.turns",
    ),
)  # fmt: skip
