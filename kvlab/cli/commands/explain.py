"""`kvlab explain`: follow a number of a report, a cell or a trial to its files and their origin."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels, TrialRow
from kvlab.cli.progress_display import ID_DIGITS
from kvlab.cli.shared_arguments import add_json, add_store, open_store, positive_int, sweep_name
from kvlab.cli.terminal import format_table
from kvlab.cli.trial_origin import TrialOrigin, TrialOrigins, format_facts
from kvlab.errors import RecordDamaged, UsageError
from kvlab.humanize import format_count, sanitize_line
from kvlab.report.number_origins import FoundOrigins, find_origins
from kvlab.report.printed_numbers import PrintedNumber, parse_number
from kvlab.report.quantities import Origin, Term
from kvlab.report.report_files import results_jsonl
from kvlab.store import Store

MAX_LISTED = 20
"""Quantities that are listed; --json has all of them."""

MAX_TERMS = 60
"""Rows of values that are listed."""

EPILOG = """\
A number is given as it is printed, with or without its unit. Every value of the record and every
number of the report that prints so is listed; the first one, or --pick, is computed again from its
trials. Of trials: files and whether they are what was written, text, code, machine, command, time.

examples:
  kvlab explain +0.5502                   (a number of a report)
  kvlab explain 128 KiB --sweep quickstart
  kvlab explain 2.4019 --report reports/quickstart
  kvlab explain mqa+trained               (a cell, by its name in the report)
  kvlab explain 3f2a                      (a trial, by the first digits of its id)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "what", metavar="NUMBER-OR-TRIAL", nargs="+",
        help="a number as printed, a trial's id or its first digits, or the name of a cell",
    )  # fmt: skip
    add_store(parser, archive=True)
    parser.add_argument("--sweep", metavar="SWEEP", help="name or file of a sweep; default: all")
    parser.add_argument(
        "--report", metavar="PATH",
        help="report in which the number stands, its folder or one of its files",
    )  # fmt: skip
    parser.add_argument(
        "--pick", type=positive_int, metavar="N", help="which of several quantities to show"
    )
    parser.add_argument(
        "--files",
        action="store_true",
        help="list the files of all trials with their sha256, as of a single one",
    )
    add_json(parser)


@dataclass(frozen=True)
class Candidate:
    """A quantity of one sweep that prints as the number."""

    study: Study
    origin: Origin


def run(options: argparse.Namespace) -> int:
    store, text = open_store(options.store), " ".join(options.what)
    report = None if options.report is None else _ReportFile.find(Path(options.report))
    studies = _load_studies(store, options, report)
    number = parse_number(text)
    trial = _find_trial(store, text)
    is_trial = trial is not None and (number is None or len(text) >= ID_DIGITS)
    if number is None or is_trial:
        for option, value in (("--pick", options.pick), ("--report", options.report)):
            if value is not None:
                raise UsageError(f"{option} is for numbers, and {text} is none; leave it out")
    if trial is not None and is_trial:
        return _explain_trial(options, store, studies, trial)
    if not studies:
        raise UsageError(f"{store.path} holds no sweep yet; name another store with --store")
    if number is not None:
        return _explain_number(options, store, studies, number, report)
    return _explain_cells(options, store, studies, text)


def _load_studies(
    store: Store, options: argparse.Namespace, report: "_ReportFile | None"
) -> list[Study]:
    """Read the sweeps that are searched: the one that is named, or all that are whole.

    Raises:
        UsageError: The store does not have the one that is named.
    """
    if options.sweep is not None:
        named = sweep_name(options.sweep)
        if report is not None and report.sweep != named:
            text = f"--sweep = {named} is not the sweep of {report.path}, which is {report.sweep}"
            raise UsageError(f"{text}; leave one of them out")
        return [Study.load(store, named)]
    if report is not None:
        return [Study.load(store, report.sweep)]
    studies = []
    for name in store.sweep_names():
        try:
            studies.append(Study.load(store, name))
        except RecordDamaged as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return studies


def _find_trial(store: Store, text: str) -> str | None:
    """Return the trial that a text is the beginning of; None if there is none, or several."""
    matches = [trial for trial in store.trial_ids() if trial.startswith(text.lower())]
    if len(matches) > 1 and parse_number(text) is None:
        return store.find_trial(text)  # raises
    return matches[0] if len(matches) == 1 else None


# Numbers


def _explain_number(
    options: argparse.Namespace,
    store: Store,
    studies: Sequence[Study],
    number: PrintedNumber,
    report: "_ReportFile | None",
) -> int:
    text = " ".join(options.what)
    found = [find_origins(study, number) for study in studies]
    candidates = [
        Candidate(study, origin)
        for study, one in zip(studies, found, strict=True)
        for origin in one.origins
    ]
    sentences = [
        f"the report of {study.name}, {sentence}"
        for study, one in zip(studies, found, strict=True)
        for sentence in one.sentences
    ]
    about = [] if report is None else report.describe(number, studies[0])
    if not candidates and not sentences:
        raise UsageError("\n".join([_describe_nothing(store, studies, found, text), *about]))
    pick = options.pick or 1
    if candidates and pick > len(candidates):
        rule = f"there is only 1 to {len(candidates)}"
        raise UsageError(f"--pick = {pick} is none of them; {rule}")
    origins = TrialOrigins(store)
    if options.json:
        return _print_number_facts(text, candidates, sentences, about, origins)
    is_rounded = any(one.is_rounded for one in found if one.origins)
    lines = list(_list_candidates(text, store, candidates, is_rounded))
    lines += [f"said in {sentence}" for sentence in sentences[:MAX_LISTED]]
    lines += about
    code = 0
    if candidates:
        shown = candidates[pick - 1]
        trials = origins.read_all(term.row.trial for term in shown.origin.terms)
        lines += _format_derivation(shown, pick if len(candidates) > 1 else None)
        lines += ["", *format_facts(trials, _name_rows(shown), with_files=options.files)]
        code = int(any(one.is_damaged for one in trials))
    print("\n".join(lines))
    return code


def _list_candidates(
    text: str, store: Store, candidates: Sequence[Candidate], is_rounded: bool
) -> Iterator[str]:
    count = len(candidates)
    if not count:
        yield f"{text}: no value of {store.path} prints so; the report states it"
        return
    how = "is printed for nothing; rounded further it is" if is_rounded else "is printed for"
    what = format_count(count, "quantity").replace("quantitys", "quantities")
    yield f"{text} {how} {what} of {store.path}" + (":" if count > 1 else "")
    for position, one in enumerate(candidates[:MAX_LISTED], 1):
        origin = one.origin
        prefix = f"{position:>3}  " if count > 1 else ""
        yield f"{prefix}{origin.title}"
        indent = " " * len(prefix)
        trials = len({term.row.trial for term in origin.terms})
        unit = f" {origin.unit}" if origin.unit else ""
        of = f"sweep {one.study.name}, {format_count(trials, 'trial')}"
        yield f"{indent}  {origin.value:.10g}{unit} ({of})"
        if origin.places:
            more = f", and {len(origin.places) - 2} more" if len(origin.places) > 2 else ""
            yield f"{indent}  in {'; '.join(origin.places[:2])}{more}"
    if count > MAX_LISTED:
        yield f"     and {count - MAX_LISTED} more; --json has all, a unit or --sweep leaves fewer"


def _format_derivation(shown: Candidate, pick: int | None) -> Iterator[str]:
    """Yield how a quantity is computed, from the values of its trials."""
    origin = shown.origin
    yield ""
    yield f"Quantity {pick}: {origin.title}" if pick else "How it is computed"
    yield f"  {origin.formula}"
    if not origin.terms or origin.terms[0].value is None:
        return
    yield ""
    pairs = _pair_terms(origin.terms)
    count = len(pairs) or len(origin.terms)
    yield _format_pairs(shown, pairs[:MAX_TERMS]) if pairs else _format_terms(shown)
    if count > MAX_TERMS:
        yield f"and {count - MAX_TERMS:,} rows more; --json has all"
    if origin.is_weighted:
        yield from _format_sums(origin, show_seeds=len(origin.terms) > _count_seeds(origin) * 2)


def _count_seeds(origin: Origin) -> int:
    return len({term.row.seed for term in origin.terms})


def _pair_terms(terms: Sequence[Term]) -> list[tuple[Term, Term]]:
    """Return terms two by two where each two are a weighted difference at one seed, else none."""
    pairs = list(zip(terms[::2], terms[1::2], strict=False))
    is_paired = len(terms) % 2 == 0 and all(
        one.weight is not None
        and other.weight is not None
        and one.row.seed == other.row.seed
        and abs(one.weight + other.weight) < 1e-12
        for one, other in pairs
    )
    return pairs if is_paired else []


def _format_pairs(shown: Candidate, pairs: Sequence[tuple[Term, Term]]) -> str:
    rows = [["seed", "cell", "trial", "value", "minus", "trial", "value", "difference", "weight"]]
    for one, other in pairs:
        assert one.value is not None, "a weighted term has a value"
        assert other.value is not None, "a weighted term has a value"
        rows.append([
            str(one.row.seed), _label(shown, one), one.row.trial[:ID_DIGITS], f"{one.value:.8g}",
            _label(shown, other), other.row.trial[:ID_DIGITS], f"{other.value:.8g}",
            f"{one.value - other.value:+.8g}", f"{one.weight:+.4g}",
        ])  # fmt: skip
    if all(row[-1] == "+1" for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    return format_table(rows, "rllrllrrr")


def _format_terms(shown: Candidate) -> str:
    terms = shown.origin.terms
    weights = {term.weight for term in terms}
    rows = [["seed", "cell", "trial", "value", "weight"]]
    for term in terms[:MAX_TERMS]:
        weight = "" if term.weight is None else f"{term.weight:+.4g}"
        value = "" if term.value is None else f"{term.value:.8g}"
        names = [str(term.row.seed), _label(shown, term), term.row.trial[:ID_DIGITS]]
        rows.append([*names, value, weight])
    if weights <= {None, 1.0}:
        rows = [row[:-1] for row in rows]
    return format_table(rows, "rllrr")


def _format_sums(origin: Origin, *, show_seeds: bool) -> Iterator[str]:
    sums, unit = origin.sums_by_seed(), f" {origin.unit}" if origin.unit else ""
    if show_seeds:
        for seed, value in sums.items():
            yield f"seed {seed}: sum of weight x difference = {value:+.8g}"
    if len(sums) > 1:
        yield f"mean over {len(sums)} seeds = {origin.recompute():.8g}{unit}"
    if abs(origin.recompute() - origin.value) > 1e-9 * max(1.0, abs(origin.value)):
        yield f"the report has {origin.value:.8g}: it leaves out trials or seeds, see its section"


def _label(shown: Candidate, term: Term) -> str:
    return sanitize_line(shown.study.label(term.row.levels))


def _name_rows(shown: Candidate) -> dict[str, str]:
    """Return cell and seed of every trial of a quantity."""
    rows = (term.row for term in shown.origin.terms)
    return {row.trial: f"{shown.study.label(row.levels)} seed={row.seed}" for row in rows}


def _describe_nothing(
    store: Store, studies: Sequence[Study], found: Sequence[FoundOrigins], text: str
) -> str:
    names = ", ".join(study.name for study in studies)
    values = f"{sum(one.searched for one in found):,} values and the report's text"
    first = f"{text} is not in the record {store.path}: {values} of {names} were searched"
    hint = "give it as printed, without a unit, or name another record with --store"
    damaged = sum(row.status == "damaged" for study in studies for row in study.rows)
    if damaged:
        hint = f"{format_count(damaged, 'trial')} left out as damaged, which `kvlab verify` names"
    near = [f"  {value:.6g}: {title}" for one in found for value, title in one.nearest][:3]
    return "\n".join([f"{first}; {hint}", *(["nearest:", *near] if near else [])])


def _print_number_facts(
    text: str,
    candidates: Sequence[Candidate],
    sentences: Sequence[str],
    about: Sequence[str],
    origins: TrialOrigins,
) -> int:
    facts = {
        "number": text,
        "quantities": [_collect_candidate(one) for one in candidates],
        "sentences": list(sentences),
        "report": list(about),
        "trials": {
            term.row.trial: origins.read(term.row.trial).as_dict()
            for one in candidates
            for term in one.origin.terms
        },
    }
    print(json.dumps(facts, indent=1))
    return int(any(one.is_damaged for one in origins.seen))


def _collect_candidate(one: Candidate) -> dict[str, Any]:
    origin = one.origin
    return {
        "sweep": one.study.name,
        "title": origin.title,
        "value": origin.value,
        "unit": origin.unit,
        "formula": origin.formula,
        "recomputed": origin.recompute() if origin.is_weighted else None,
        "places": list(origin.places),
        "terms": [
            {
                "trial": term.row.trial,
                "levels": list(term.row.levels),
                "seed": term.row.seed,
                "weight": term.weight,
                "value": term.value,
            }
            for term in origin.terms
        ],
    }


# Trials and cells


def _explain_trial(
    options: argparse.Namespace, store: Store, studies: Sequence[Study], trial: str
) -> int:
    origin = TrialOrigins(store).read(trial)
    cells = [
        f"{study.name}: {study.label(row.levels)} seed={row.seed}"
        for study in studies
        for row in study.rows
        if row.trial == trial
    ]
    if options.json:
        print(json.dumps({"cells": cells, **origin.as_dict()}, indent=1))
        return int(origin.is_damaged)
    where = "; ".join(cells) or "in no cell of these sweeps"
    lines = [f"trial {trial}: {origin.status}; {where}"]
    lines += format_facts([origin], {}, with_files=True)
    print("\n".join(lines))
    return int(origin.is_damaged)


def _explain_cells(
    options: argparse.Namespace, store: Store, studies: Sequence[Study], text: str
) -> int:
    found = [(study, levels) for study in studies if (levels := _find_cell(study, text))]
    if not found:
        names = dict.fromkeys(study.label(levels) for study in studies for levels in study.cells)
        listed = ", ".join(list(names)[:12]) + (", ..." if len(names) > 12 else "")
        rule = f"is no number, no trial of {store.path} and no cell of its sweeps"
        near = get_close_matches(text, names, 1)
        hint = f"did you mean {near[0]}?" if near else f"cells are {listed}"
        raise UsageError(sanitize_line(f"{text} {rule}; {hint}"))
    origins, code, facts = TrialOrigins(store), 0, []
    for study, levels in found:
        rows = [row for row in study.cells[levels].values() if row.trial]
        named = {row.trial: f"{study.label(levels)} seed={row.seed}" for row in rows}
        trials = origins.read_all(named)
        code = max(code, int(any(one.is_damaged for one in trials)))
        facts.append(_collect_cell(study, levels, trials))
        if not options.json:
            lines = list(_describe_cell(study, levels, rows))
            lines += format_facts(trials, named, with_files=options.files)
            print("\n".join(lines))
    if options.json:
        print(json.dumps(facts, indent=1))
    return code


def _find_cell(study: Study, text: str) -> Levels | None:
    """Return the cell of a name: as in reports, or by all levels that are not the baseline's."""
    for levels in study.cells:
        if study.label(levels) == text:
            return levels
    words = set(text.replace(",", " ").replace("+", " ").split())
    for levels in study.cells:
        pairs = list(zip(study.factors, levels, study.baseline, strict=True))
        names = [{level, f"{factor}={level}"} for factor, level, _ in pairs]
        is_named = all(
            bool(name & words) or level == base
            for name, (_, level, base) in zip(names, pairs, strict=True)
        )
        if words and is_named and words <= set().union(*names):
            return levels
    return None


def _describe_cell(study: Study, levels: Levels, rows: Sequence[TrialRow]) -> Iterator[str]:
    pairs = ", ".join(f"{f}={level}" for f, level in zip(study.factors, levels, strict=True))
    trials = format_count(len(rows), "trial")
    yield f"cell {study.label(levels)} of sweep {study.name}: {pairs}; {trials}"
    for factor, level in zip(study.factors, levels, strict=True):
        patch = study.sweep.get("patches", {}).get(factor, {}).get(level)
        if patch:
            settings = ", ".join(f"{key}: {value}" for key, value in patch.items())
            yield f"  {factor}={level} sets {settings}"


def _collect_cell(study: Study, levels: Levels, trials: Sequence[TrialOrigin]) -> dict[str, Any]:
    named = dict(zip(study.factors, levels, strict=True))
    return {"sweep": study.name, "levels": named, "trials": [one.as_dict() for one in trials]}


# Reports


@dataclass(frozen=True)
class _ReportFile:
    """A file of a report, and the sweep that it is about."""

    path: Path
    folder: Path

    @property
    def sweep(self) -> str:
        return self.folder.name

    @classmethod
    def find(cls, path: Path) -> "_ReportFile":
        """Return the file of ``--report``; of a folder its ``report.md``.

        Raises:
            UsageError: It is not in the folder of a report.
        """
        path = path.resolve()
        for folder in (path, *path.parents[:2]):
            if (folder / "report.md").is_file():
                return cls(path if path.is_file() else folder / "report.md", folder)
        text = f"--report = {path} is not in the folder of a report"
        raise UsageError(f"{text}; name one that `kvlab report` has written")

    def describe(self, number: PrintedNumber, study: Study) -> list[str]:
        """Say on which lines the number stands, and whether the record still gives the report."""
        try:
            lines = self.path.read_text("utf-8", "replace").splitlines()
            rows = (self.folder / "results.jsonl").read_text("utf-8", "replace")
        except OSError as error:
            raise RecordDamaged(f"{error.filename} cannot be read: {error.strerror}") from None
        at = [str(place) for place, line in enumerate(lines, 1) if number.is_in(line)]
        where = f"on lines {', '.join(at[:12])}" if at else "on no line"
        same = "its results.jsonl is what the record gives now"
        if rows != results_jsonl(study):
            same = "its results.jsonl is NOT what the record gives now: other trials, or edited;"
            same = f"{same} `kvlab report {self.sweep}` writes it again"
        return [f"{self.path.name} of {self.folder.name}: the number stands {where}; {same}"]
