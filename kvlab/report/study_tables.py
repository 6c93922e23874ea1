"""The tables of sweeps in `sweeps/README.md`: each question from its file, each verdict computed.

A table of sweeps has a first column *question*, a last column *verdict*, and in between a link to a
sweep and links to reports. The other columns are written by people.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvlab.analysis.study import Study
from kvlab.report.document import Bullets, Paragraph, Span, Strong
from kvlab.report.markdown import escape_markdown
from kvlab.report.sections import choose_sections
from kvlab.spec.yaml_reader import read_yaml


def fill_study_tables(page: str, sweeps: Path, studies: Mapping[str, Study]) -> str:
    """Return a page with the questions and the verdicts of its tables of sweeps.

    Args:
        page: The page as it is.
        sweeps: Its folder, with the sweeps that it links to.
        studies: Studies by the name of their report.

    Raises:
        SpecError: A sweep cannot be read.
    """
    lines, is_table = page.split("\n"), False
    for number, line in enumerate(lines):
        cells = [one.strip() for one in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells:
            is_table = False
        elif (cells[0], cells[-1]) == ("question", "verdict"):
            is_table = True
        elif is_table and (sweep := re.search(r"\]\(([\w.-]+\.yaml)\)", line)) is not None:
            question = str(read_yaml(sweeps / sweep[1]).data.get("question", ""))
            reports = re.findall(r"/([\w.-]+)/report\.md\)", " ".join(cells[1:-1]))
            found = [summarize(studies[name]) for name in reports if name in studies]
            verdict = escape_markdown(" ".join(found)) or "not run"
            lines[number] = f"| {' | '.join((escape_markdown(question), *cells[1:-1], verdict))} |"
    return "\n".join(lines)


def summarize(study: Study) -> str:
    """Return the answer of a study's report as plain text: its lead, its bullets, its warnings."""
    answer = choose_sections(study.search is not None)["answer"].make(study)
    assert answer is not None, "every report has an answer"
    sentences, others = [], []
    for content in answer.contents[1:]:  # the first is the question
        match content:
            case Paragraph(spans, "lead"):
                sentences.append(_plain(spans))
            case Bullets(items):
                sentences += map(_plain, items)
            case Paragraph((Strong(text), *_)) if text.endswith((".", ":")):
                sentences.append(f"{text.rstrip('.:')}.")
            case Paragraph(spans, ""):
                others.append(_plain(spans))
    has_bullets = any(isinstance(content, Bullets) for content in answer.contents)
    return " ".join(sentences if has_bullets else [*sentences, *others[:1]])


def _plain(spans: Iterable[Span]) -> str:
    return "".join(span if isinstance(span, str) else span.text for span in spans)
