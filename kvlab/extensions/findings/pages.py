"""`kvlab findings`: write what the records say of the claims in `reports/claims.yaml`, as a page.

Every figure, interval and verdict on the page is computed from a record, so none is typed by hand.
So are the questions and verdicts of the tables in `sweeps/README.md`.
"""

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from kvlab.analysis.effects import Effect, change_name
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.analysis.verdicts import CHEAP
from kvlab.cli.shared_arguments import add_flag, add_reports
from kvlab.errors import SpecError, StoreError
from kvlab.extensions.findings.articles import article_claims
from kvlab.extensions.findings.claims import Answer, CellLevels, Claims, load_claims
from kvlab.extensions.findings.text_error import estimate_text_error
from kvlab.fs.atomic_files import write_atomic
from kvlab.humanize import format_bytes, format_count, format_number, suggest_name
from kvlab.own_extensions import find_member, name_members
from kvlab.report import formatting as fmt
from kvlab.report.document import Paragraph, plain_text
from kvlab.report.markdown import code_span, escape_markdown
from kvlab.report.sections import make_answer
from kvlab.report.sections.effects import judge_other_metrics
from kvlab.spec.validation_errors import format_value
from kvlab.spec.yaml_reader import Key, YamlDocument, read_yaml
from kvlab.store.metrics import METRICS
from kvlab.store.record_archive import ARCHIVE_SUFFIX, extract_archive

RECORD = f"record{ARCHIVE_SUFFIX}"
PAGE = "FINDINGS.md"
TOLERANCE = 0.02
"""An article's figure holds if the right one differs by no more than this share of it."""

EXPLORED = "explored only"
HOLDS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "bounded": (frozenset(CHEAP), frozenset({"worse", "diverged"})),
    "better": (frozenset({"better"}), frozenset({"worse", "worse within", "identical"})),
}
"""What must be shown -> verdicts on the difference that show it, and those that refute it."""

_UNTESTED = ("", "unclaimed", "one seed", "unvaried", "disturbed")
_NONE = "\N{EN DASH}"


@dataclass(frozen=True)
class Finding:
    """A row of the page: what one part of a record says of a claim, in Markdown.

    Attributes:
        compared: What is compared with what, with a link to the table of the report.
        figure: The difference or the quantity, with its unit.
        interval: The simultaneous interval, or that the figure is exact.
    """

    verdict: str
    compared: str
    figure: str = _NONE
    interval: str = _NONE
    text_error: str = _NONE
    seeds: str = _NONE
    parameters: str = _NONE


class Refused(Exception):
    """A key of an answer that the record does not have, and what to write."""

    def __init__(self, keys: tuple[Key, ...], message: str):
        self.keys, self.message = keys, message


# The command

EPILOG = """\
It reads REPORTS/claims.yaml and every REPORTS/NAME/record.tar.xz, and writes REPORTS/FINDINGS.md.
In sweeps/README.md beside REPORTS, if there is one, it writes the questions and the verdicts of the
tables of sweeps. `kvlab copy NAME --to REPORTS/NAME/record.tar.xz` writes a record.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_reports(parser)
    add_flag(parser, "--check", "write nothing; exit with 1 if a page is out of date")


def run(options: argparse.Namespace) -> int:
    reports = Path(options.reports)
    sweeps_page = reports.parent / "sweeps" / "README.md"
    claims, document = load_claims(reports / "claims.yaml")
    with tempfile.TemporaryDirectory() as folder:
        studies = read_studies(reports, Path(folder))
        pages = {reports / PAGE: make_findings(claims, document, studies)}
        if sweeps_page.is_file():
            text = sweeps_page.read_text(encoding="utf-8")
            pages[sweeps_page] = fill_study_tables(text, sweeps_page.parent, studies)
    is_current = True
    for path, text in pages.items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        is_current = False
        if options.check:
            print(f"{path}: is not what the records say; run `kvlab findings`")
        else:
            write_atomic(path, text)
            print(path)
    if is_current:
        print("every page is what the records say")
    return int(options.check and not is_current)


# Records


def read_studies(reports: Path, folder: Path) -> dict[str, Study]:
    """Read the committed record of every report.

    Args:
        folder: An empty folder, in which the records stay as long as they are read.

    Raises:
        StoreError: A file is no record, or that of another sweep.
    """
    studies = {}
    for path in sorted(reports.glob(f"*/{RECORD}")):
        store = extract_archive(path, folder / path.parent.name)
        (name,) = store.sweep_names()
        if name != path.parent.name:
            raise StoreError(f"{path} is the record of {name}; move it to {reports / name}")
        studies[name] = Study.load(store, name)
    return studies


# The page


def make_findings(claims: Claims, document: YamlDocument, studies: Mapping[str, Study]) -> str:
    """Return the page.

    Args:
        claims: What articles claim.
        document: The file with the claims, for the places of mistakes.

    Raises:
        SpecError: Answers name what no record has: with file, line and column.
    """
    head = Path(__file__).with_name("head.md.in").read_text("utf-8").rstrip()
    fields = {"near": fmt.format_percent(TOLERANCE, 0), **_describe_error_budget(studies)}
    problems, parts = [], [Template(head).substitute(fields)]
    for number, article in enumerate(claims.articles):
        title, rows = escape_markdown(article.article), list(_HEAD)
        for place, claim in enumerate(article.claims):
            findings = []
            for index, answer in enumerate(claim.answers):
                try:
                    findings += _answer(answer, studies)
                except Refused as error:
                    path = ("articles", number, "claims", place, "answers", index, *error.keys)
                    problems.append(document.problem(path, error.message))
            note = f" *{escape_markdown(claim.note)}*" if claim.note else ""
            first = escape_markdown(claim.claim) + note
            for finding in findings or [Finding("not run", "no record answers it")]:
                rows.append(f"| {' | '.join((first, *vars(finding).values()))} |")
                first = ""
        linked = f"[{title}]({article.address})" if article.address else title
        parts += [f"## {linked}", "\n".join(rows)]
    if problems:
        raise SpecError(problems)
    return "\n\n".join(parts) + "\n"


_HEAD = (
    "| the article says | verdict | compared | figure | simultaneous interval | over texts | seeds"
    " | parameters |",
    "| :-- | :-- | :-- | --: | --: | --: | --: | --: |",
)


def _describe_error_budget(studies: Mapping[str, Study]) -> dict[str, str]:
    """Say what the intervals of a sweep hold for together, and which sweeps share trainings."""
    deciding = [
        study
        for study in studies.values()
        if not study.is_untrained and any(e.is_tested for e in study.effects(study.primary_metric))
    ]
    errors = " or ".join(f"{100 * a:g}%" for a in sorted({one.decide.alpha for one in deciding}))
    users: dict[str, list[str]] = {}
    for name, study in studies.items():
        for training in sorted({row.training for row in study.rows if row.training}):
            users.setdefault(training, []).append(name)
    shared = Counter(tuple(names) for names in users.values() if len(names) > 1)
    listed = ", ".join(
        f"{' and '.join(names)} share {format_count(count, 'training')}"
        for names, count in sorted(shared.items())
    )
    sweeps = format_count(len(deciding), "sweep")
    return {"sweeps": sweeps, "errors": errors, "shared": listed or "none"}


# Answers


def _answer(answer: Answer, studies: Mapping[str, Study]) -> list[Finding]:
    """Return what an answer finds: one row, or one for each setting where settings disagree.

    Raises:
        Refused: It names what there is not.
    """
    if answer.kind == "formula":
        return [_answer_by_formula(str(answer.formula))]
    study = studies.get(str(answer.record))
    if study is None:
        rule = f"has no reports/{answer.record}/{RECORD}"
        raise _unknown(("record",), str(answer.record), studies, rule)
    if answer.kind == "effect":
        return _answer_by_effects(study, answer)
    if answer.kind == "trend":
        return [_answer_by_trend(study, str(answer.trend))]
    return [(_answer_by_cell if answer.kind == "cell" else _answer_by_quantity)(study, answer)]


def _unknown(keys: tuple[Key, ...], value: str, known: Iterable[str], rule: str) -> Refused:
    names = list(known)
    hint = suggest_name(value, names, f"use one of {', '.join(names) or 'none'}")
    return Refused(keys, f"{keys[-1]} = {format_value(value)} {rule}; {hint}")


def _answer_by_effects(study: Study, answer: Answer) -> list[Finding]:
    """Return the effect of a level, once for every setting that is judged by itself."""
    effects = study.effects(study.primary_metric)
    if answer.metric is not None:  # as in the report's table of other measurements
        others = judge_other_metrics(study)
        effects = [one for one in others if one.metric == answer.metric]
        if not effects:
            known = dict.fromkeys(one.metric for one in others)
            rule = f"has no effects beside the decided ones in {study.name}"
            raise _unknown(("metric",), answer.metric, known, rule)
    by_level: dict[str, list[Effect]] = {}
    for one in effects:
        for name in {change_name(one.change), one.name}:
            by_level.setdefault(name, []).append(one)
    if answer.effect not in by_level:
        rule = f"is no level of {study.name} that is compared with a baseline"
        raise _unknown(("effect",), str(answer.effect), by_level, rule)
    findings = []
    for one in by_level[answer.effect]:
        what = f"{_link(study, 'what-each-level-does')}: {code_span(one.name, in_table=True)}"
        what += f", {len(one.by_setting)} settings" if one.by_setting[1:] else ""
        what += f", {METRICS[one.metric].title}" if answer.metric else ""
        verdict = _judge(answer.holds, one.verdict_name, one.verdict, not one.is_claimed)
        if one.estimate is None:
            findings.append(Finding(verdict, what))
        else:
            findings.append(_compare_cells(study, verdict, what, one.metric, one))
    return findings


def _judge(holds: str | None, verdict_name: str, words: str, is_explored: bool) -> str:
    """Return whether a claim holds, with the words of the report's verdict."""
    if holds is None or is_explored or verdict_name in _UNTESTED:
        return EXPLORED
    if verdict_name == "unbounded":
        return "undecided, as a training went wrong"
    shown, refuted = HOLDS[holds]
    if verdict_name not in shown | refuted:
        return "undecided"
    return f"**{'holds' if verdict_name in shown else 'does not hold'}**: {words}"


def _compare_cells(study: Study, verdict: str, compared: str, metric: str, found: Any) -> Finding:
    """Return a finding of a difference of cells, with its errors, its seeds and its sizes.

    Args:
        found: An `Effect`, a `CellComparison` or a trend over sizes.
    """
    error = estimate_text_error(study, metric, found.weights, found.seeds)
    unit = fmt.difference_unit(metric).replace("nats/token", "")
    sizes = [count for levels in found.weights if (count := study.parameters(levels)) is not None]
    return Finding(
        verdict,
        compared,
        f"{fmt.format_difference(metric, found.value)} {unit}".strip(),
        fmt.format_interval(metric, found.low, found.high) if found.has_interval else _NONE,
        _NONE if error is None else f"{fmt.PLUS_MINUS}{fmt.format_magnitude(metric, error)}",
        str(len(found.seeds)),
        fmt.format_ends(sizes, format_number) or _NONE,
    )


def _answer_by_trend(study: Study, level: str) -> Finding:
    """Return how an effect changes with size, of which no sweep decides anything."""
    listed = find_member("size_trends", "list")(study) if name_members("size_trends") else ()
    trends = {f"{one.factor}={one.level}": one for one in listed if one.slope}
    if level not in trends:
        raise _unknown(("trend",), level, trends, f"is no level with a trend in {study.name}")
    what = f"{code_span(level, in_table=True)}, change with ten times the size"
    compared = f"{_link(study, 'how-effects-change-with-size')}: {what}"
    return _compare_cells(study, EXPLORED, compared, study.primary_metric, trends[level])


def _find_cell(study: Study, levels: CellLevels | None, key: str) -> Levels:
    """Return the baseline with other levels.

    Raises:
        Refused: The design has no such factor, level or cell.
    """
    changed = levels or {}
    for factor, level in changed.items():
        if factor not in study.factors:
            names = ", ".join(study.factors)
            raise Refused((key, factor), f"{factor} is no factor of {study.name}; use {names}")
        if level not in study.factors[factor]:
            raise _unknown((key, factor), level, study.factors[factor], f"is no level of {factor}")
    pairs = zip(study.factors, study.baseline, strict=True)
    cell = tuple(changed.get(factor, base) for factor, base in pairs)
    if cell not in study.cells:
        rule = f"is no cell of {study.name}"
        raise _unknown((key,), study.label(cell), map(study.label, study.cells), rule)
    return cell


def _answer_by_cell(study: Study, answer: Answer) -> Finding:
    """Return a cell against its reference."""
    levels = _find_cell(study, answer.cell, "cell")
    found = study.comparisons.get(levels)
    if found is None:
        text = f"cell = {study.label(levels)} has no reference in {study.name}; name another cell"
        raise Refused(("cell",), text)
    cell, reference = (code_span(study.label(c), in_table=True) for c in (levels, found.reference))
    what = f"{_link(study, 'cells')}: {cell} against {reference}"
    factor = study.size_factor(levels)
    what += f", {fmt.format_ratio(factor)} smaller" if factor else ""
    if found.token_factor is not None and found.token_factor != 1.0:
        what += f", on {fmt.format_ratio(found.token_factor)} the training tokens"
    is_explored = study.has_narrow_claims and found.effect is None
    verdict = _judge(answer.holds, found.verdict_name, found.verdict, is_explored)
    return _compare_cells(study, verdict, what, study.primary_metric, found)


def _answer_by_quantity(study: Study, answer: Answer) -> Finding:
    """Return a measured or exact quantity of a cell, or how much smaller it is than another's."""
    metric, levels = str(answer.quantity), _find_cell(study, answer.cell, "cell")
    other = _find_cell(study, answer.smaller_than, "smaller_than")
    value, larger = study.mean(levels, metric), study.mean(other, metric)
    if value is None or larger is None or metric not in METRICS:
        rule = f"was not measured in {study.name}"
        raise _unknown(("quantity",), metric, study.measured_metrics, rule)
    what = f"{METRICS[metric].title} of {code_span(study.label(levels), in_table=True)}"
    unit = fmt.display_unit(metric)
    figure = _format_quantity(value, f"{fmt.format_metric(metric, value)} {unit}")
    if answer.smaller_than is not None:
        if not value:
            raise Refused(("smaller_than",), f"{metric} is 0, and no ratio; remove smaller_than")
        value = larger / value
        what += f", against {code_span(study.label(other), in_table=True)}"
        figure = f"{fmt.format_ratio(value)} smaller"
    is_bytes = unit == "bytes" and answer.smaller_than is None
    anchor = next((to for start, to in _ANCHORS.items() if metric.startswith(start)), "speed")
    count = study.parameters(levels)
    return Finding(
        EXPLORED if answer.says is None else _compare_figures(answer.says, value, is_bytes),
        f"{_link(study, anchor)}: {what}",
        figure,
        "exact" if metric.startswith("kv_bytes") else _NONE,
        seeds=str(len(study.values(levels, metric))),
        parameters=_NONE if count is None else format_number(count),
    )


_ANCHORS = {
    "bits": "cells",
    "hellaswag": "cells",
    "kv_": "memory",
    "loss": "cells",
    "peak_": "memory",
    "serving_": "serving-gap",
    **name_members("report_anchors"),
}
"""Beginning of a metric -> the section of a report that has it."""


def _answer_by_formula(name: str) -> Finding:
    claims = {one.name: one for one in article_claims()}
    if name not in claims:
        raise _unknown(("formula",), name, claims, "is no number of an article")
    claim = claims[name]
    is_large = claim.unit == "FLOPs"
    text = format_number(claim.exact, claim.unit) if is_large else f"{claim.exact:,} {claim.unit}"
    verdict = _compare_figures(claim.claimed, claim.exact, claim.unit == "bytes")
    page = "[formula](../kvlab/benchmark/README.md#the-articles-numbers)"
    what = f"{page}: {escape_markdown(name)}"
    return Finding(verdict, what, _format_quantity(claim.exact, text), "exact")


def _format_quantity(value: float, text: str) -> str:
    """Return a number with its unit; bytes in binary units, too."""
    return f"{text} ({format_bytes(value)})" if text.endswith(" bytes") else text.strip()


def _compare_figures(says: float, value: float, is_bytes: bool) -> str:
    """Return whether an article's figure holds; of bytes, also if its MB or GB are binary."""
    meant = [says, *((says * 1.024**n for n in (1, 2, 3)) if is_bytes else ())]
    is_right = any(abs(value - one) <= TOLERANCE * abs(one) for one in meant)
    return f"**{'holds' if is_right else 'does not hold'}**"


def _link(study: Study, anchor: str) -> str:
    return f"[{study.name}]({study.name}/report.md#{anchor})"


# The tables of sweeps


def fill_study_tables(page: str, sweeps: Path, studies: Mapping[str, Study]) -> str:
    """Return a page with the questions and the verdicts of its tables of sweeps.

    A table of sweeps has a first column *question*, a last column *verdict*, and in between a link
    to a sweep and links to reports. The other columns are written by people.

    Args:
        sweeps: Its folder, with the sweeps that it links to.

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
            found = [_shorten(summarize(studies[name])) for name in reports if name in studies]
            verdict = escape_markdown(" ".join(found)) or "not run"
            lines[number] = f"| {' | '.join((escape_markdown(question), *cells[1:-1], verdict))} |"
    return "\n".join(lines)


def _shorten(lead: str) -> str:
    """Return what a lead says of the smallest cache that is shown to be cheap, in few words."""
    return re.sub(
        r"^The smallest cache .* shown to (.*) is that of (.*)\.$",
        r"Smallest shown to \1: \2.",
        lead,
    )


def summarize(study: Study) -> str:
    """Return the first sentence of the answer of a study's report, as plain text."""
    contents = make_answer(study).contents[1:]  # after the question
    paragraphs = [one for one in contents if isinstance(one, Paragraph)]
    lead = next((one for one in paragraphs if one.tone == "lead"), paragraphs[0])
    return re.split(r"(?<=\.) (?=[A-Z])", plain_text(lead.spans))[0]
