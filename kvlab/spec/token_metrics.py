"""Metrics of users' files: a number of every scored token, whose mean a trial records."""

import ast
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import ModuleType
from typing import Any, ClassVar, Literal, NamedTuple

from kvlab.spec.members import Member

Better = Literal["lower", "higher", "neither"]


class ScoredTokens(NamedTuple):
    """Some scored tokens of a few windows of text. A metric may overwrite these tensors.

    Shapes: N tokens, V vocab_size, B windows, T tokens that a window reads.

    Attributes:
        logits: (N, V), which predict them.
        targets: (N,), their ids.
        windows: (B, T), the ids that are read.
        rows: (N,), the window of each token.
        positions: (N,), of the last token that is read before it:
            ``windows[rows, positions]`` are the tokens before ``targets``.
    """

    logits: Any
    targets: Any
    windows: Any
    rows: Any
    positions: Any

    def clone(self) -> "ScoredTokens":
        return ScoredTokens(*(one.clone() for one in self))


class TokenMetric(Member, ABC):
    """A number of every scored token, such as whether the right one is among the five likeliest.

    A trial records its mean one-shot and, as ``<name>_served``, through the serving cache, over the
    same text. Attributes are written as plain text, so that a report can read them without running
    the file.

    Attributes:
        name: in the record, of a-z, 0-9 and _.
        title: for tables.
        unit: printed after the number; empty for a share between 0 and 1.
        better: which direction is an improvement.
    """

    title: ClassVar[str]
    unit: ClassVar[str]
    better: ClassVar[Better]

    def find_definition_problem(self, _module: ModuleType, text: str) -> str | None:
        fields = tuple(getattr(self, one, None) for one in TEXT_FIELDS)
        texts = read_metric_texts(text)
        if fields in {(one.name, one.title, one.unit, one.better) for one in texts}:
            return None
        pairs = zip(TEXT_FIELDS, fields, strict=True)
        said = ", ".join(f"{key} = {value!r}" for key, value in pairs)
        hint = "write each as plain text in the class, name of a-z, 0-9 and _, better"
        return f"is not described by {said}; {hint} as lower, higher or neither"

    @abstractmethod
    def score(self, tokens: ScoredTokens) -> Any:
        """Return the number of each token (N,).

        If only some tokens count, return a pair: the numbers, and which count, (N,) of bool.
        """


class MetricText(NamedTuple):
    """What a file says of a metric.

    Attributes:
        line: of its class.
    """

    name: str
    title: str
    unit: str
    better: Better
    line: int


LONGEST_TITLE = 120
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
TEXT_FIELDS = ("name", "title", "unit", "better")


def read_metric_texts(text: str) -> Iterator[MetricText]:
    """Yield the metrics of a file, which is not run; of what is no Python nothing.

    A file may come from a record: what could not be a name, or would not be one line of plain text
    on a terminal, is left out.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        found: dict[str, str] = {}
        for statement in node.body:
            match statement:
                case ast.Assign([ast.Name(name)], ast.Constant(str(value))) if name in TEXT_FIELDS:
                    found[name] = value
        match found:
            case {"better": "lower" | "higher" | "neither" as better, **rest} if len(rest) == 3:
                name, title, unit = rest["name"], rest["title"], rest["unit"]
                is_shown = f"{title}{unit}".isprintable() and 0 < len(title) <= LONGEST_TITLE
                if _NAME.fullmatch(name) and is_shown and len(unit) <= LONGEST_TITLE:
                    yield MetricText(name, title, unit, better, node.lineno)


def select_scores(values: Any, count: int) -> Any:
    """Return what `TokenMetric.score` returned for ``count`` tokens, in float64; NaN of those that
    do not count.

    Raises:
        ValueError: it is no number for each token.
    """
    parts = values if isinstance(values, tuple) else (values,)
    if isinstance(values, tuple) and len(parts) != 2:
        hint = "return numbers, or a pair of numbers and a tensor of bool"
        raise ValueError(f"returns a tuple of {len(parts)}; {hint}")
    for one in parts:
        if not hasattr(one, "double"):  # no tensor, such as an array of NumPy
            raise ValueError(f"returns {type(one).__name__}; return a tensor")
        if tuple(one.shape) != (count,):
            text = f"returns {tuple(one.shape)} for {count} tokens"
            raise ValueError(f"{text}; return one number for each")
    scores, *counted = parts
    if counted and str(counted[0].dtype) != "torch.bool":
        raise ValueError(f"returns {counted[0].dtype} beside numbers; return a tensor of bool")
    is_counted = counted[0] if counted else scores.new_ones(scores.shape).bool()
    scores = scores.double()
    chosen = scores[is_counted]
    if len(chosen) and not math.isfinite(mean := float(chosen.mean())):
        raise ValueError(f"has a mean of {mean}; return finite numbers")
    return scores.masked_fill(~is_counted, math.nan)
