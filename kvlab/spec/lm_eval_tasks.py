"""`evaluation.lm_eval`: tasks of EleutherAI's lm-eval harness, by name or by a file of one's own.

This module finds the YAML files of tasks without importing lm-eval, which takes seconds, and its
own index of 15,000 tasks takes longer still.
"""

import hashlib
import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from kvlab.errors import Problem, SpecError
from kvlab.spec.spec_model import PositiveInt, SpecModel, TextRule
from kvlab.spec.validation_errors import FieldError

if TYPE_CHECKING:
    from kvlab.spec.sweep import Sweep

_TASK_LINE = re.compile(r"""^task:[ \t]*["']?([\w.-]+)["']?[ \t]*(?:#.*)?$""", re.MULTILINE)
"""Defines one task. In the file of a group, ``task`` holds a list."""

_TASK_NAME = TextRule(
    r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}",
    "is not the name of a task; use letters, digits, '_', '.' and '-'",
)


class LmEvalTask(SpecModel):
    """One task of lm-eval."""

    task: Annotated[str, _TASK_NAME]
    """Its name in lm-eval. Example: arc_easy"""
    limit: PositiveInt | None = None
    """Score the first N items. Unit: items. Default: all. Example: 500"""
    definition: str | None = None
    """YAML file that defines the task, where it is not one of lm-eval's own.
    Default: lm-eval's own. Example: letters.yaml"""

    @property
    def metric_prefix(self) -> str:
        """What the names of its metrics start with."""
        return f"lm_eval_{re.sub('[^a-z0-9]+', '_', self.task.lower())}_"

    def identity(self) -> dict[str, Any]:
        """Return what is scored: a file of one's own enters by its contents."""
        facts = super().identity()
        if self.definition is not None:
            facts["definition"] = hashlib.sha256(Path(self.definition).read_bytes()).hexdigest()
        return facts


def _name_to_task(value: Any) -> Any:
    return {"task": value} if isinstance(value, str) else value


LmEvalTaskField = Annotated[
    LmEvalTask, BeforeValidator(_name_to_task, json_schema_input_type=str | LmEvalTask)
]
"""A task, or its name alone."""


def find_task_file(task: LmEvalTask) -> Path:
    """Return the YAML file that defines a task.

    Raises:
        LookupError: there is none; the message says why, and what to write instead.
    """
    if find_spec("lm_eval") is None:
        raise LookupError("needs lm-eval, which is not installed; run pip install 'kvlab[lm-eval]'")
    if task.definition is not None:
        path = Path(task.definition)
        if not path.is_file():
            raise LookupError(f"is to be defined by {path}, which is not a file")
        if task.task not in _TASK_LINE.findall(path.read_text(encoding="utf-8")):
            raise LookupError(f"is not defined by {path}; it needs the line task: {task.task}")
        return path
    files = _index_tasks()
    if task.task not in files:
        matches = get_close_matches(task.task, files, 3)
        hint = f"did you mean {' or '.join(matches)}?" if matches else "see lm-eval ls tasks"
        raise LookupError(f"is not a task of lm-eval (of a group, name its tasks); {hint}")
    return files[task.task]


@lru_cache(maxsize=1)
def _index_tasks() -> dict[str, Path]:
    """Return the files of lm-eval's own tasks by name."""
    package = find_spec("lm_eval")
    assert package is not None, "checked by the caller"
    assert package.origin is not None, "it is a package of files"
    files = sorted((Path(package.origin).parent / "tasks").rglob("*.y*ml"))
    return {
        name: path
        for path in files
        for name in _TASK_LINE.findall(path.read_text(encoding="utf-8", errors="replace"))
    }


def check_lm_eval(sweep: "Sweep") -> None:
    """Check that lm-eval has the tasks that the cells of a sweep are evaluated on.

    Raises:
        SpecError: each problem is placed at the task.
    """
    problems: dict[tuple[str, int, int], Problem] = {}
    for cell in sweep.cells():
        for error in _find_task_errors(cell.experiment.evaluation.lm_eval):
            problem = sweep.locate(error, cell.levels)
            problems.setdefault((problem.file, problem.line, problem.column), problem)
    if problems:
        raise SpecError(list(problems.values()))


def _find_task_errors(tasks: tuple[LmEvalTask, ...]) -> Iterator[FieldError]:
    for number, task in enumerate(tasks):
        try:
            find_task_file(task)
        except LookupError as error:
            text = f"evaluation.lm_eval.{number} = {task.task} {error}"
            yield FieldError(("evaluation", "lm_eval", number), text)
