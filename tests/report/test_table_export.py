"""LaTeX tables: well-formed, literal, and set by a real pdfLaTeX where there is one."""

import re
import shutil
import subprocess

import pytest

from kvlab.report import write_report
from kvlab.report.document import Column, Row, Table, cell
from kvlab.report.table_export import escape_latex, table_to_latex
from tests.report.test_escaping import hostile_record

PDFLATEX = shutil.which("pdflatex")

# What escaped text may consist of: nothing that TeX takes for more than a letter.
LITERAL = re.compile(
    r"(?:[^\\{}$&%#_^~<>|\"'`*\[\]\x00-\x1f]"
    r"|\\(?:text[a-z]+|ldots)\{\}|\\[{}$&%#_]|\{\\char34\}|\{[-,*\[\]]\}"
    r"|\$(?:-|\\pm|\\times)\$|~|\\texttt\{U\+[0-9A-F]{4,6}\})*\Z"
)

EVIL = [
    r"\input{/etc/passwd}", r"\write18{rm -rf .}", r"$x^2_1$", "a & b \\\\ c", "% gone", "#1 ~ {",
    "^^5cinput", "--- ,, ?` !` << >> ''", "[b] *", "\x00\x1b[31m\n\nnew", "\u202egnp", "日本 é ß ŉ đ \u00d7\u00f7",
]  # fmt: skip


@pytest.mark.parametrize("text", EVIL)
def test_escaped_text_is_literal(text):
    assert LITERAL.match(escape_latex(text)), escape_latex(text)
    assert not re.search("--|,,", escape_latex(text))


def booktabs() -> str:
    """The package where this TeX has it; else rules as it has them."""
    found = subprocess.run(["kpsewhich", "booktabs.sty"], capture_output=True, timeout=60)
    rules = r"\let\toprule\hline\let\midrule\hline\let\bottomrule\hline"
    return r"\usepackage{booktabs}" if found.stdout.strip() else rules


@pytest.mark.skipif(PDFLATEX is None, reason="needs the program pdflatex")
def test_hostile_tables_are_set(tmp_path):
    store = hostile_record().write(tmp_path / "store")
    sections = ["answer", "effects", "cells", "hellaswag", "failures", "provenance"]
    folder = write_report(store, "made", tmp_path, sections)
    texts = [*EVIL, "".join(map(chr, range(0x20, 0x180)))]
    evil = Table("evil", EVIL[0], (Column(EVIL[1]),), tuple(Row((cell(t),)) for t in texts))
    (folder / "tables" / "evil.tex").write_text(table_to_latex(evil), encoding="utf-8")
    many = Table("many", EVIL[2], evil.columns, evil.rows * 4)
    (folder / "tables" / "many.tex").write_text(table_to_latex(many), encoding="utf-8")
    tables = sorted((folder / "tables").glob("*.tex"))
    uses = [path.read_text().splitlines()[0] for path in tables]
    needed = {p for use in uses for p in re.search(r"usepackage{(.*?)}", use)[1].split(",")}
    assert needed == {"booktabs", "graphicx", "longtable"}
    packages = "".join(rf"\usepackage{{{name}}}" for name in sorted(needed - {"booktabs"}))
    head = rf"\documentclass{{article}}{packages}{booktabs()}\begin{{document}}\tiny"
    # As the comment above each says that it is used; floats are put out as they come.
    body = "\n\\clearpage\n".join(re.search(r"\\input.*", use)[0] for use in uses)
    labels = [rf"\ref{{tab:{path.stem}}}" for path in tables if path.stem != "paper"]
    body += "\n".join(labels)
    paper = folder / "tables" / "paper.tex"
    paper.write_text(f"{head}\n{body}\n\\end{{document}}\n")
    command = [PDFLATEX, "-halt-on-error", "-interaction=nonstopmode", "paper.tex"]
    for _ in range(2):  # the second time references are known
        done = subprocess.run(command, cwd=paper.parent, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stdout.decode(errors="replace")[-3000:]
    log = paper.with_suffix(".log").read_bytes()
    assert b"Missing character" not in log
    assert b"LaTeX Warning: Reference" not in log, "labels can be referred to"
