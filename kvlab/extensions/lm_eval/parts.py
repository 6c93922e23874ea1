"""What tasks of lm-eval add to kvlab."""

from kvlab.own_extensions import Parts, SectionPart

PARTS = Parts(
    fields={"evaluation": ".config:LmEvalFields"},
    members={"paths": {"evaluation.lm_eval": ".config:join_definitions"}},
    file_problems=".config:find_file_problems",
    evaluations=(".harness:evaluate_tasks",),
    details=("tasks",),
    sections=(SectionPart("lm-eval", "hellaswag", ".section:report_lm_eval"),),
    measurement_code=(".config", ".harness"),
)
