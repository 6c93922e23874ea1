"""What the probes add to kvlab."""

from kvlab.own_extensions import Parts

PARTS = Parts(
    fields={"evaluation": ".config:ProbeFields"},
    problems=".config:find_problems",
    members={
        "text_requests": {"needle": ".config:list_text_requests"},
        "report_anchors": {"needle_": "probes", "recall_acc": "probes"},
        "probe_reports": {"recall": ".section:report_recall", "needle": ".section:report_needles"},
    },
    evaluations=(".probes:measure_probes",),
    lines=("needle",),
    measurement_code=(".config", ".probes"),
)
