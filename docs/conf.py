"""Sphinx: the Markdown pages of the repository and the generated reference as one offline site.

The source folder is the repository, so that links between its pages hold in both places. Pages
that follow from the code are written to `docs/generated/` before every build, by `generate.py`.
"""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]

from generate import write_pages  # noqa: E402

project = "kvlab"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
exclude_patterns = ["kvlab/**/texts.md"]  # templates of reports, no pages
include_patterns = [
    "*.md", "docs/*.md", "docs/generated/*", "experiments/*.md", "sweeps/*.md", "kvlab/*/*.md",
    "kvlab/*.md", "kvlab/extensions/*/*.md", "reports/*.md", "reports/*/report.md",
    "reports/gpu/*.md",
]  # fmt: skip
html_theme = "furo"
html_title = "kvlab"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
default_role = "code"
suppress_warnings = ["myst.header", "myst.strikethrough"]

START = '<!doctype html><title>kvlab</title><meta http-equiv="refresh" content="0; url={}.html">'


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", lambda app: write_pages(Path(app.srcdir) / "docs" / "generated"))
    app.connect("source-read", unlink_folders)
    app.connect("build-finished", write_start_page)


def unlink_folders(app: Sphinx, name: str, source: list[str]) -> None:
    """Turn links to folders of the repository into text: the site has pages alone."""
    page = Path(app.srcdir, name).parent

    def keep_text(link: re.Match[str]) -> str:
        return link[1] if (page / link[2]).is_dir() else link[0]

    source[0] = re.sub(r"\[([^\]]*)\]\(([^)\s#]+)\)", keep_text, source[0])


def write_start_page(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        Path(app.outdir, "index.html").write_text(START.format(root_doc))
