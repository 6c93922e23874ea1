"""What the probes add to kvlab."""

from kvlab.own_extensions import Parts

_FOLDER = "kvlab.extensions.probes"

PARTS = Parts(
    fields={"evaluation": f"{_FOLDER}.config:ProbeFields"},
    problems=f"{_FOLDER}.config:find_problems",
    members={
        "text_requests": {"needle": f"{_FOLDER}.config:list_text_requests"},
        "probe_reports": {
            "recall": f"{_FOLDER}.section:report_recall",
            "needle": f"{_FOLDER}.section:report_needles",
        },
    },
    evaluations=(f"{_FOLDER}.probes:measure_probes",),
    lines=("needle",),
    measurement_code=(f"{_FOLDER}.config", f"{_FOLDER}.probes"),
)
