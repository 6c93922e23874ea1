"""Figures: labels, lines and axes; the quickstart's are compared byte for byte elsewhere."""

from itertools import combinations

import pytest

from kvlab.report.document import SERIES, Axis, Line, Plot, Point, Points, Reference, draw_series
from kvlab.report.figures import draw_plot, figure_style, render_inline_svg


def point(x, y, name, **more):
    return Point(x, y, (name, "second line"), f"key-{name}", **more)


def drawn(plot, width=6.4):
    with figure_style("made"):
        figure = draw_plot(plot, width)
        figure.draw_without_rendering()
        return figure, figure.axes[0]


def test_titles_and_descriptions_are_escaped():
    bad = '"><script>alert(1)</script>$x$\x1b'
    plot = Plot(Axis(bad), Axis("y"), (Points("", (Point(1, 1, (bad,), bad, bad),)),))
    text = render_inline_svg(plot, "made", bad)
    assert "<script" not in text
    assert "\x1b" not in text
    assert "$x$" in text, "no mathematics"
    assert 'data-key="&quot;&gt;&lt;script' in text


def test_lines_that_lie_close_differ_in_dashes_and_marks():
    """No two lines have both alike, and marks of lines at one place are not all at one point."""
    points = [Point(x, 1.0) for x in range(7)]
    lines = [draw_series(number, f"line {number}", points) for number in range(len(SERIES))]
    _, axes = drawn(Plot(Axis("x"), Axis("y"), tuple(lines)))
    styles = {
        (one.get_linestyle(), one.get_marker(), one.get_markerfacecolor() == "white")
        for one in axes.lines
    }
    assert len(styles) == len(SERIES)
    assert {one.get_markevery() for one in axes.lines} == {(0, 3), (1, 3), (2, 3)}


def test_every_label_of_a_front_is_written_and_meets_neither_others_nor_marks():
    crowd = tuple(point(x / 12, -x / 40 + (x % 3) / 30, f"cell+number{x}", label=f"cell+number{x}")
                  for x in range(12))  # fmt: skip
    _, axes = drawn(Plot(Axis("x"), Axis("y"), (Points("crowd", crowd),)))
    boxes = [label.get_window_extent() for label in axes.texts if label.get_text()]
    centers = axes.transData.transform([(p.x, p.y) for p in crowd])
    assert len(boxes) == len(crowd)
    assert not [1 for one, other in combinations(boxes, 2) if one.overlaps(other)]
    assert not [1 for box in boxes for center in centers if box.contains(*center)]


@pytest.mark.parametrize(
    ("kind", "values", "ticks"),
    [
        ("bytes", (2**18, 2**18), ["128 KiB", "256 KiB", "512 KiB"]),
        ("bytes", (70 * 2**10, 2**18), ["96 KiB", "128 KiB", "192 KiB", "256 KiB"]),
        ("bytes", (2**10, 2**30), ["512 B", "32 KiB", "2 MiB", "128 MiB"]),
        ("log", (0.4, 0.85), ["0.45", "0.60", "0.75"]),
        ("log", (2e-3, 0.02), ["0.002", "0.005", "0.01", "0.02"]),
        (
            "log",
            (1e-8, 0.01),
            ["1e\N{MINUS SIGN}8", "1e\N{MINUS SIGN}6", "1e\N{MINUS SIGN}4", "0.01"],
        ),
    ],
)
def test_a_logarithmic_axis_has_three_ticks_or_more_and_shows_marks_at_one_place(
    kind, values, ticks
):
    points = Points("", tuple(Point(x, y) for y, x in enumerate(values)))
    _, axes = drawn(Plot(Axis("x", kind), Axis("y"), (points,)), 3.3)
    low, high = axes.get_xlim()
    assert low < min(values) <= max(values) < high
    assert [label.get_text() for label in axes.get_xticklabels()] == ticks


def test_marks_at_one_place_share_a_label_which_no_line_strikes_through():
    crowd = (point(2.0, 1.0, "a", label="base"), point(2.0, 1.0, "b", label="other"))
    steps = Line("", (Point(1.0, 1.0), Point(3.0, 1.0)), "c0")
    lines = (Reference("y", 1.0),)
    _, axes = drawn(Plot(Axis("x"), Axis("y"), (Points("", crowd), steps), lines))
    (label,) = axes.texts
    assert label.get_text() == "base, other"
    box = label.get_window_extent()
    assert not box.y0 < axes.transData.transform((2.0, 1.0))[1] < box.y1
