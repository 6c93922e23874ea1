"""What tasks of lm-eval add to kvlab."""

from kvlab.own_extensions import Parts, SectionPart

_FOLDER = "kvlab.extensions.lm_eval"

PARTS = Parts(
    fields={"evaluation": f"{_FOLDER}.config:LmEvalFields"},
    members={"paths": {"evaluation.lm_eval": f"{_FOLDER}.config:join_definitions"}},
    file_problems=f"{_FOLDER}.config:find_file_problems",
    evaluations=(f"{_FOLDER}.harness:evaluate_tasks",),
    details=("tasks",),
    sections=(SectionPart("lm-eval", "hellaswag", f"{_FOLDER}.section:report_lm_eval"),),
    measurement_code=(f"{_FOLDER}.config", f"{_FOLDER}.harness"),
)
