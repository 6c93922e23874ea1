"""`evaluation.lm_eval` of an experiment: which tasks, and the files that define them.

The YAML files of lm-eval's tasks are found without importing lm-eval, which takes seconds, and its
own index of 15,000 tasks takes longer still.
"""

import hashlib
import re
from collections.abc import Callable
from difflib import get_close_matches
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from kvlab.spec import spec_model as spec

if TYPE_CHECKING:
    from kvlab.spec.experiment import Experiment

_TASK_LINE = re.compile(r"""^task:[ \t]*["']?([\w.-]+)["']?[ \t]*(?:#.*)?$""", re.MULTILINE)
"""Defines one task. In the file of a group, ``task`` holds a list."""

_TASK_NAME = spec.TextRule(
    r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}",
    "is not the name of a task; use letters, digits, '_', '.' and '-'",
)


class LmEvalTask(spec.SpecModel):
    """One task of lm-eval."""

    task: Annotated[str, _TASK_NAME]
    """Its name in lm-eval. Example: arc_easy"""
    limit: spec.PositiveInt | None = None
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


class LmEvalFields(spec.SpecModel):
    """What `evaluation` gets."""

    omitted_defaults = frozenset({"lm_eval"})

    lm_eval: spec.TupleOf[LmEvalTaskField] = ()
    """Tasks of lm-eval: names, or {task, limit, definition}.
    Example: [arc_easy, {task: piqa, limit: 500}]"""

    def _find_problems(self) -> spec.Problems:
        yield from super()._find_problems()
        prefixes = [task.metric_prefix for task in self.lm_eval]
        for number, task in enumerate(self.lm_eval):
            if task.metric_prefix in prefixes[:number]:
                text = "is in the list before, by this name or one of the same letters"
                yield f"lm_eval.{number}", f"{text}; name each task once"

    def identity(self) -> dict[str, Any]:
        tasks = [task.identity() for task in self.lm_eval]
        return super().identity() | ({"lm_eval": tasks} if tasks else {})


def join_definitions(value: Any, join: Callable[[str], str]) -> Any:
    """Return tasks with the paths of their definitions joined to the folder of the spec."""
    if not isinstance(value, list):
        return value
    return [
        {**item, "definition": join(item["definition"])}
        if isinstance(item, dict) and isinstance(item.get("definition"), str)
        else item
        for item in value
    ]


def find_file_problems(experiment: "Experiment") -> spec.Problems:
    """Yield the tasks whose files cannot be found."""
    for number, task in enumerate(LmEvalFields.of(experiment.evaluation).lm_eval):
        try:
            find_task_file(task)
        except LookupError as error:
            yield f"evaluation.lm_eval.{number}", f" = {task.task} {error}"


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
        try:
            names = _TASK_LINE.findall(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            text = f"is to be defined by {path}, which is no text in UTF-8"
            raise LookupError(f"{text}; save it as such") from None
        if task.task not in names:
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
    return {
        name: path
        for path in sorted((Path(package.origin).parent / "tasks").rglob("*.y*ml"))
        for name in _TASK_LINE.findall(path.read_text(encoding="utf-8", errors="replace"))
    }
