"""What looks add to kvlab."""

from kvlab.own_extensions import Parts, SectionPart

PARTS = Parts(
    members={
        "staged_seeds": {"looks": ".config:SeedLooks"},
        "sequential_tests": {"looks": ".judgement:LookTests"},
        "looks": {"bounds": ".sequential:t_bounds"},
    },
    sections=(SectionPart("looks", "effects", ".section:report_looks"),),
)
