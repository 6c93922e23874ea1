"""Render a plot as a PDF page for a paper, at the width of a column and with its text size."""

import io
from typing import Any

from kvlab.report.figures.axes import draw_plot, figure_style
from kvlab.report.figures.plot import Plot

PDF_STYLE: dict[str, Any] = {
    "font.family": ["STIXGeneral", "DejaVu Sans"],  # the first is drawn after Times
    "font.size": 8.0,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.fontsize": 8.0,
    "mathtext.fontset": "stix",
    "lines.linewidth": 1.0,
    "lines.markersize": 4.0,
    "pdf.fonttype": 42,  # TrueType: publishers refuse the default, Type 3
}


def render_pdf(plot: Plot, name: str, width: float) -> bytes:
    """Render a plot as one PDF page, with text of 8 pt and fonts embedded as TrueType.

    Args:
        plot: The plot.
        name: Name of the figure.
        width: Width of the page, in inches.
    """
    with figure_style(name, PDF_STYLE):
        figure, pdf = draw_plot(plot, width), io.BytesIO()
        no_metadata = {"CreationDate": None, "Creator": None, "Producer": None}
        figure.savefig(pdf, format="pdf", metadata=no_metadata)
    return pdf.getvalue()
