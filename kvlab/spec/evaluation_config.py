"""`evaluation` of an experiment: which qualities are measured, and on how much.

The YAML files of lm-eval's tasks are found without importing lm-eval, which takes seconds, and its
own index of 15,000 tasks takes longer still.
"""

import hashlib
import re
from difflib import get_close_matches
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from kvlab.spec import spec_model as spec

NEEDLE_KEY_TOKENS = 4
NEEDLE_ANSWER_TOKENS = 4

SHORTEST_NEEDLE_ROW = 4 * (NEEDLE_KEY_TOKENS + NEEDLE_ANSWER_TOKENS)
"""Tokens of the shortest row of the needle probe: half of it is text."""

Depth = Annotated[float, Field(ge=0.0, le=1.0)]


class NeedleConfig(spec.SpecModel):
    """`evaluation.needle`: find a key's answer in real text, by length and depth."""

    lengths: Annotated[spec.TupleOf[spec.PositiveInt], Field(min_length=1)]
    """Tokens of a row, in increasing order. Unit: tokens. Example: [64, 128, 256]"""
    depths: Annotated[spec.TupleOf[Depth], Field(min_length=1)] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Shares of the text before the needle, in increasing order.
    Unit: share. Example: [0, 0.5, 1]"""
    rows: Annotated[spec.PositiveInt, Field(ge=2)] = 32
    """Rows of each length and depth; errors are over them. Unit: rows. Example: 64"""

    def _find_problems(self) -> spec.Problems:
        for name, values in (("lengths", self.lengths), ("depths", self.depths)):
            if list(values) != sorted(set(values)):
                increasing = ", ".join(f"{value:g}" for value in sorted(set(values)))
                yield name, f"does not increase; use [{increasing}]"
        if self.lengths[0] < SHORTEST_NEEDLE_ROW:
            text = "has a length that leaves too little text around the needle and its question"
            yield "lengths", f"{text}; use {SHORTEST_NEEDLE_ROW} or more"


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


class EvaluationConfig(spec.SpecModel):
    """`evaluation`: quality. Every number once one-shot, and once through the cache if served."""

    omitted_defaults = frozenset({"needle", "loss_bytes", "lm_eval", "precision"})

    loss_tokens: spec.PositiveInt = 65_536
    """Validation tokens of the final loss. Unit: tokens. Example: 262144"""
    loss_bytes: spec.PositiveInt | None = None
    """Bytes of validation text of the final loss, in whole documents, in place of loss_tokens: the
    same text for every tokenizer and block size.
    Unit: bytes. Default: loss_tokens decides. Example: 200000"""
    hellaswag: Literal["all", "none"] | spec.NonNegativeInt = "none"
    """all, none, or the first N items. Unit: items. Example: 1000"""
    served: bool = True
    """Measure again through the serving cache. Example: false"""
    served_tokens: spec.PositiveInt | None = None
    """Validation tokens scored through the cache, token by token.
    Unit: tokens. Default: loss_tokens. Example: 16384"""
    recall: spec.NonNegativeInt = 0
    """Rows of the associative recall probe; 0 for none. Unit: rows. Example: 256"""
    positions: bool = False
    """Measure the loss by position; over served_tokens if served. Example: true"""
    needle: NeedleConfig | None = None
    """The needle probe. Default: none. Example: {lengths: [64, 128]}"""
    precision: Literal["training", "float32"] = "training"
    """Of the weights that are evaluated and benchmarked on a GPU: that of the training, or float32.
    On CPU they are always float32.
    Example: float32"""
    lm_eval: spec.TupleOf[LmEvalTaskField] = ()
    """Tasks of lm-eval: names, or {task, limit, definition}.
    Example: [arc_easy, {task: piqa, limit: 500}]"""

    def _find_problems(self) -> spec.Problems:
        prefixes = [task.metric_prefix for task in self.lm_eval]
        for number, task in enumerate(self.lm_eval):
            if task.metric_prefix in prefixes[:number]:
                text = "is in the list before, by this name or one of the same letters"
                yield f"lm_eval.{number}", f"{text}; name each task once"
        if self.loss_bytes is None:
            return
        if self.loss_tokens != type(self).model_fields["loss_tokens"].default:
            yield "loss_bytes", "and loss_tokens both say how much text is scored; remove one"
        if self.served_tokens is not None:
            text = "counts tokens, and loss_bytes scores the same text one-shot and served"
            yield "served_tokens", f"{text}; remove one"
        if self.positions:
            text = "is measured over as many tokens as the loss, which loss_bytes does not count"
            yield "positions", f"{text}; give loss_tokens in its place, or leave one out"

    @property
    def hellaswag_items(self) -> int | None:
        """The number of items to score: None for all, 0 for none."""
        if isinstance(self.hellaswag, int):
            return self.hellaswag
        return None if self.hellaswag == "all" else 0


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
    return {
        name: path
        for path in sorted((Path(package.origin).parent / "tasks").rglob("*.y*ml"))
        for name in _TASK_LINE.findall(path.read_text(encoding="utf-8", errors="replace"))
    }
