"""What the mix adds to kvlab."""

from kvlab.own_extensions import Parts, SectionPart

_FOLDER = "kvlab.extensions.mix"

PARTS = Parts(
    fields={"data": f"{_FOLDER}.config:MixFields"},
    problems=f"{_FOLDER}.division:find_problems",
    members={"sources": {"mix": f"{_FOLDER}.config:SOURCE"}},
    sections=(SectionPart("mix", "probes", f"{_FOLDER}.section:report_mix"),),
    losses=(f"{_FOLDER}.losses:divide_losses",),
    measurement_code=(f"{_FOLDER}.losses",),
)
