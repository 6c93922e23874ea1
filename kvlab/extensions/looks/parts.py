"""What looks add to kvlab."""

from kvlab.own_extensions import Parts, SectionPart

_FOLDER = "kvlab.extensions.looks"

PARTS = Parts(
    members={
        "staged_seeds": {"looks": f"{_FOLDER}.config:SeedLooks"},
        "sequential_tests": {"looks": f"{_FOLDER}.judgement:LookTests"},
        "looks": {"bounds": f"{_FOLDER}.sequential:t_bounds"},
    },
    sections=(SectionPart("looks", "effects", f"{_FOLDER}.section:report_looks"),),
)
