"""What the recall source adds to kvlab."""

from kvlab.own_extensions import Parts, SectionPart

_FOLDER = "kvlab.extensions.recall"

PARTS = Parts(
    fields={"data": f"{_FOLDER}.config:RecallFields"},
    members={
        "sources": {"recall": f"{_FOLDER}.config:SOURCE"},
    },
    sections=(SectionPart("recall", "probes", f"{_FOLDER}.section:report_recall"),),
    evaluations=(f"{_FOLDER}.accuracy:measure_recall",),
    measurement_code=(f"{_FOLDER}.accuracy",),
)
