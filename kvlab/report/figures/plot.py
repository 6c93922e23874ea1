"""What a figure shows, in data units. How it looks is decided in `layout`."""

from dataclasses import dataclass
from typing import Literal

Role = Literal["ink", "muted", "c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7"]
"""A colour by what it is for; the themes decide on the colours."""

Shape = Literal["dot", "square", "diamond", "triangle", "ring"]

SERIES: tuple[Role, ...] = ("c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7")


@dataclass(frozen=True)
class Point:
    """One mark.

    Attributes:
        tip: lines that are shown on hover.
        key: the design's cell that it is about, for selection across the page.
        label: text beside it, if there is room.
        x_range, y_range: the ends of its error bars.
    """

    x: float
    y: float
    tip: tuple[str, ...] = ()
    key: str = ""
    label: str = ""
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None


@dataclass(frozen=True)
class Points:
    """Marks that look the same; ``name`` is their entry in the legend."""

    name: str
    points: tuple[Point, ...]
    role: Role = "c0"
    shape: Shape = "dot"


@dataclass(frozen=True)
class Line:
    """Points joined by a line, itself without marks; they still answer to hovering."""

    name: str
    points: tuple[Point, ...]
    role: Role = "c0"
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """``bytes`` is logarithmic; ``names`` has one row a name, the first on top (y = 0, 1, ...)."""

    title: str
    kind: Literal["linear", "bytes", "names"] = "linear"
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plot:
    """Layers are drawn in order. ``zero`` draws a line at x = 0."""

    x: Axis
    y: Axis
    layers: tuple[Points | Line, ...]
    zero: bool = False
