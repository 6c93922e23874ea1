"""What the tuning of recipes adds to kvlab."""

from kvlab.own_extensions import Parts, SectionPart

_FOLDER = "kvlab.extensions.tuning"

PARTS = Parts(
    fields={"sweep": f"{_FOLDER}.config:TuneFields"},
    members={
        "preparations": {"tune": f"{_FOLDER}.planning:TuningPlanner"},
        "sweep_problems": {"tune": f"{_FOLDER}.config:find_sweep_problems"},
        "cell_problems": {"tune": f"{_FOLDER}.config:find_cell_problems"},
        "recipes": {"tune": f"{_FOLDER}.section:describe_recipe"},
    },
    sections=(SectionPart("tuned", "design", f"{_FOLDER}.section:report_tuning"),),
)
