"""What the recall source adds to kvlab."""

from kvlab.own_extensions import Parts, SectionPart

PARTS = Parts(
    fields={"data": ".config:RecallFields"},
    members={"sources": {"recall": ".config:SOURCE"}},
    sections=(SectionPart("recall", "probes", ".section:report_recall"),),
    evaluations=(".accuracy:measure_recall",),
    measurement_code=(".accuracy",),
)
