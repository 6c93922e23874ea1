"""What the tuning of recipes adds to kvlab."""

from kvlab.own_extensions import Parts, SectionPart

PARTS = Parts(
    fields={"sweep": ".config:TuneFields"},
    members={
        "preparations": {"tune": ".planning:TuningPlanner"},
        "sweep_problems": {"tune": ".config:find_sweep_problems"},
        "cell_problems": {"tune": ".config:find_cell_problems"},
        "recipes": {"tune": ".section:describe_recipe"},
    },
    sections=(SectionPart("tuned", "design", ".section:report_tuning"),),
)
