"""What the mix adds to kvlab."""

from kvlab.own_extensions import Parts, SectionPart

PARTS = Parts(
    fields={"data": ".config:MixFields"},
    problems=".division:find_problems",
    members={"sources": {"mix": ".config:SOURCE"}},
    sections=(SectionPart("mix", "probes", ".section:report_mix"),),
    losses=(".losses:divide_losses",),
    measurement_code=(".losses",),
)
