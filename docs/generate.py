"""Write the pages of the site that follow from the code, and their pictures."""

import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout, suppress
from inspect import getdoc
from math import cos, pi, sin
from pathlib import Path

from kvlab.cli.commands import COMMANDS
from kvlab.cli.main import build_parser
from kvlab.extensions.reference.key_reference import format_key_reference
from kvlab.extensions.reference.metrics import format_markdown
from kvlab.sharing import PATTERNS, owner_map
from kvlab.spec.designs import DESIGNS, DesignRequest
from kvlab.store.metrics import METRICS

PUBLIC = {
    "kvlab.model": "The model",
    "kvlab.cache": "The cache, and passes through it",
    "kvlab.layout": "Bytes and FLOPs without running anything",
    "kvlab.sharing": "Which layer reads whose K/V",
    "kvlab.spec": "Specs: what a person writes",
    "kvlab.data": "Text and tokens",
    "kvlab.train": "Training",
    "kvlab.evaluate": "Evaluation",
    "kvlab.store": "The record",
    "kvlab.trial": "Trials and their identity",
    "kvlab.sweep": "Plans and drivers",
    "kvlab.track": "MLflow",
    "kvlab.report": "Reports",
}
"""The packages whose public names the site describes."""


def write_pages(folder: Path) -> None:
    """Write every generated page; files that are current are not touched."""
    folder.mkdir(exist_ok=True)
    pages = {
        "experiment.md": format_key_reference("experiment"),
        "sweep.md": format_key_reference("sweep"),
        "metrics.md": format_markdown(list(METRICS)) + "\n",
        "commands.md": describe_commands(),
        "sharing-patterns.md": describe_patterns(),
        "designs.md": describe_designs(),
        "python.md": describe_python(),
    }
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def describe_commands() -> str:
    """Return the help of every command."""
    os.environ["COLUMNS"] = "100"  # the width to which argparse wraps
    parts = ["# Commands"]
    for name, summary in COMMANDS.items():
        printed = io.StringIO()
        with redirect_stdout(printed), suppress(SystemExit):
            build_parser([name]).parse_args([name, "--help"])
        parts.append(f"## `kvlab {name}`\n\n{summary.capitalize()}.\n")
        parts.append(f"```text\n{printed.getvalue().rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def describe_python() -> str:
    """Return the page of the Python names."""
    parts = ["# Python", "The public names of each package. Everything else may change."]
    for package, title in PUBLIC.items():
        parts.append(
            f"## {title}: `{package}`\n\n```{{eval-rst}}\n.. automodule:: {package}\n"
            "   :members:\n   :imported-members:\n```"
        )
    return "\n\n".join(parts) + "\n"


DEPTH = 12
KINDS = {"all layers global": "G" * DEPTH, "one global layer in six": "GLLLLL" * 2}


def describe_patterns() -> str:
    """Return the page of sharing patterns, with a picture of the owners of each."""
    parts = [
        "# Sharing patterns",
        "`model.kv_sharing` and `serving.tie` say which layers share one K/V. The lowest layer of"
        " a group owns it; the others read it. The layers of a group are of one kind: a local"
        " layer keeps only its window. In the pictures a box is a layer, G global and L local; a"
        " line leads from a layer to the owner that it reads, and boxes with a thick border own"
        " their K/V.",
        "Explicit groups, `[[0, 6], [1, 2]]`, and explicit owners, `[0, 0, 2, 2]`, are written as"
        " lists. [Tie rules](../tie-rules.md) say who writes a slot that was not trained as one.",
    ]
    for pattern in PATTERNS.values():
        written = pattern.usage.replace(":N", ":2").replace(":K", ":4")
        parts += [f"## `{pattern.usage}`", _format_docstring(pattern.groups)]
        for title, kinds in KINDS.items():
            owners = owner_map(written, kinds)
            count = len(set(owners))
            parts.append(
                f"`{written}` on {DEPTH} layers, {title}: {count} of {DEPTH} layers own K/V.\n\n"
                + raw_html(draw_owners(owners, kinds))
            )
    return "\n\n".join(parts) + "\n"


def draw_owners(owners: tuple[int, ...], kinds: str) -> str:
    """Return a picture of an owner map as SVG.

    Args:
        owners: for every layer the layer whose K/V it reads.
        kinds: one letter a layer.
    """
    longest = max(layer - owner for layer, owner in enumerate(owners))
    step, size, top = 46, 32, 8 + _arc_height(longest) if longest else 8
    width = step * len(owners) + 10
    shapes = []
    for layer, owner in enumerate(owners):
        left, is_owner = 10 + step * layer, layer == owner
        shapes.append(
            f'<rect x="{left}" y="{top}" width="{size}" height="{size}" rx="4" fill="currentColor"'
            f' fill-opacity="{0.18 if kinds[layer] == "G" else 0.04}" stroke="currentColor"'
            f' stroke-width="{2.5 if is_owner else 0.8}"/>'
            f'<text x="{left + size / 2}" y="{top + 21}" text-anchor="middle">{kinds[layer]}</text>'
            f'<text x="{left + size / 2}" y="{top + 50}" text-anchor="middle"'
            f' font-size="11">{layer}</text>'
        )
        if not is_owner:
            start, end = left + size / 2, 10 + step * owner + size / 2
            height = _arc_height(layer - owner)
            shapes.append(
                f'<path d="M {start} {top} C {start} {top - height}, {end} {top - height},'
                f' {end} {top}" fill="none" stroke="currentColor" stroke-width="1.2"/>'
            )
    label = ", ".join(f"layer {i} reads {o}" for i, o in enumerate(owners) if i != o)
    return _make_svg(width, top + 56, label or "every layer owns its K/V", shapes)


def _arc_height(layers: int) -> int:
    """Return how far the line between layers so far apart goes up, in pixels."""
    return min(54, 12 + 5 * layers)


DRAWN = {"heads": ("mha", "mqa"), "horizon": ("global", "hybrid"), "sharing": ("none", "trained")}
"""The factors that the page of designs draws."""

LISTED = ({"heads": "mqa"}, {factor: own[1] for factor, own in DRAWN.items()})
Positions = tuple[int, ...]
DESIGN_NOTES: Mapping[str, str] = {
    "full": "Every effect and every interaction can be estimated, each from all cells.",
    "one_factor": "The cheapest. An effect holds beside the baseline; interactions are not seen.",
    "baseline": "Beside another design, in `designs:`, for more seeds of the cell that all others"
    " are compared with.",
    "leave_one_out": "What each reduction adds to all others together.",
    "cumulative": "A path from the baseline to all reductions; an effect depends on the order.",
    "pairwise": "The fewest cells that show every interaction of two factors.",
    "cells": "Those listed under `cells:`, here mqa alone and everything together.",
    "fractional": "A part of the full design, in which some effects are aliased: they cannot be"
    " told apart. The report names them.",
}


def describe_designs() -> str:
    """Return the page of designs: the cells that each draws of three factors of two levels."""
    parts = [
        "# Designs",
        "A design selects the cells of a sweep. Each is shown for three factors of two levels:"
        " `heads` (mha, mqa), `horizon` (global, hybrid) and `sharing` (none, trained). A corner of"
        " the cube is a cell; filled corners are trained. The corner in front at the lower left"
        " is the baseline.",
        "`exclude` drops cells of a design, `include` adds some, and `when` makes a factor"
        " conditional: see [sweeps](../../sweeps/README.md).",
    ]
    for name, design in DESIGNS.items():
        written = f"{name}:{design.arguments[0]}" if design.arguments else name
        request = DesignRequest(
            DRAWN,
            targets={},
            listed=LISTED if name == "cells" else (),
            fraction=design.arguments[0] if design.arguments else 1,
        )
        changes = list(design.cells(request))
        cells = tuple(
            tuple(own.index(cell.get(factor, own[0])) for factor, own in DRAWN.items())
            for cell in changes
        )
        parts += [
            f"## `{written}`",
            f"{design.title.capitalize()}: {len(cells)} of 8 cells. {DESIGN_NOTES.get(name, '')}",
            raw_html(draw_cube(cells)),
            "\n".join(_list_cells(cells)),
        ]
        parts += [f"- {note}" for note in design.notes(request)]
    return "\n\n".join(parts) + "\n"


def _list_cells(cells: tuple[Positions, ...]) -> Iterator[str]:
    yield f"| {' | '.join(DRAWN)} |"
    yield f"|{'---|' * len(DRAWN)}"
    for cell in cells:
        levels = (own[at] for own, at in zip(DRAWN.values(), cell, strict=True))
        yield f"| {' | '.join(levels)} |"


def draw_cube(cells: tuple[Positions, ...]) -> str:
    """Return a picture of the cells of three factors of two levels as SVG."""

    def locate(cell: Positions) -> tuple[float, float]:
        heads, horizon, sharing = cell
        return (
            60 + 110 * heads + 60 * cos(pi / 6) * horizon,
            170 - 100 * sharing - 60 * sin(pi / 6) * horizon,
        )

    corners = [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)]
    shapes = []
    for corner in corners:
        for axis in range(3):
            if not corner[axis]:
                other = tuple(1 if i == axis else at for i, at in enumerate(corner))
                (x1, y1), (x2, y2) = locate(corner), locate(other)
                shapes.append(
                    f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
                    ' stroke="currentColor" stroke-opacity="0.35"/>'
                )
    for corner in corners:
        x, y = locate(corner)
        fill = "currentColor" if corner in cells else "var(--color-background-primary, white)"
        shapes.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="{fill}" stroke="currentColor"/>'
        )
    for text, x, y in (("heads", 115, 192), ("horizon", 235, 166), ("sharing", 28, 72)):
        shapes.append(f'<text x="{x}" y="{y}" text-anchor="middle" font-size="12">{text}</text>')
    names = ", ".join("".join(map(str, cell)) for cell in cells)
    return _make_svg(280, 200, f"cells {names}", shapes)


def raw_html(markup: str) -> str:
    return f"```{{raw}} html\n{markup}\n```"


def _make_svg(width: float, height: float, label: str, shapes: list[str]) -> str:
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}" font-family="sans-serif" font-size="14" style="max-width: 100%"'
        f' fill="currentColor">{"".join(shapes)}</svg>'
    )


def _format_docstring(function: Callable[..., object]) -> str:
    """Return a docstring without its first word, which names the pattern."""
    text = (getdoc(function) or "").partition(": ")[2]
    return (text[:1].upper() + text[1:]).replace("\n", " ").replace("  ", "\n\n")
