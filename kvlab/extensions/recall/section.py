"""The report's section of the source `recall`: right answers by number of pairs and distance."""

import re
from collections.abc import Iterator

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.humanize import format_count
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import table_columns as cols

_GROUP = re.compile(r"recall_([0-9]+)_(pairs|back)")
_SCORINGS = {"one-shot": "", "served": "_served"}


def report_recall(study: Study) -> doc.Section | None:
    """Report how many answers are right, of all and of each group of questions."""
    found = [match for name in study.measured_metrics if (match := _GROUP.fullmatch(name))]
    if "recall" not in study.measured_metrics:
        return None
    chances = {row.measurements["recall_chance"] for row in study.done_rows
               if "recall_chance" in row.measurements}  # fmt: skip
    guessed = " or ".join(f"{100 * chance:.3g}%" for chance in sorted(chances, reverse=True))
    note = (
        "A document shows pairs of a key and a value, then asks for values. Recall is the share of"
        f" right answers: those that are the likeliest token. Guessing gets {guessed}. Tokens back"
        " are those from a question to its pair. Both scorings are of the same documents."
    )
    tables = []
    for by, caption in (("pairs", "by pairs of the document"), ("back", "by tokens back")):
        groups = {match[0]: int(match[1]) for match in found if match[2] == by}
        if len(groups) > 1 or by == "back":
            tables.append(_make_table(study, f"recall-{by}", caption, by, groups))
    return doc.Section("Recall", (doc.Paragraph((note,)), *tables))


def _make_table(
    study: Study, name: str, caption: str, by: str, groups: dict[str, int]
) -> doc.Table:
    rows: list[doc.KeyedRow] = []
    for levels in study.cells:
        for scoring, ending in _SCORINGS.items():
            if study.values(levels, f"recall{ending}"):
                named: doc.Entries = (
                    ("cell", study.label(levels)),
                    ("scored", scoring),
                    *_list_entries(study, levels, by, groups, ending),
                )
                rows.append((named, study.cell_key(levels)))
    words = f"Right answers (%) {caption}, mean over {format_count(len(study.seeds), 'seed')}."
    if len(study.seeds) > 1:
        words += f" {fmt.PLUS_MINUS} is the standard deviation."
    return doc.make_table(name, words, rows)


def _list_entries(
    study: Study, levels: Levels, by: str, groups: dict[str, int], ending: str
) -> Iterator[tuple[doc.Column, doc.Value]]:
    """Yield all answers, then those of each group; a hint says how many they are."""
    for metric, number in {"recall": 0, **groups}.items():
        head = "all"
        if metric in groups:
            first = number // 2 + 1 if by == "back" else number
            head = f"{number}" if first == number else f"{first}\N{EN DASH}{number}"
        counts = {row.measurements.get(f"{metric}_items", 0) for row in study.done_rows} - {0}
        hint = " or ".join(f"{int(count):,}" for count in sorted(counts)) + " answers a trial"
        column = cols.mean_column(head, fmt.display_unit(metric), hint)
        yield column, cols.mean_cell(study, levels, f"{metric}{ending}")
