"""The report's section of the source `recall`: right answers by number of pairs and distance."""

import re

from kvlab.analysis.study import Study
from kvlab.report import document as doc
from kvlab.report.sections.tasks import hint_counts, scored_table

_GROUP = re.compile(r"recall_([0-9]+)_(pairs|back)")


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
            heads = {"recall": "all"}
            for metric, number in groups.items():
                first = number // 2 + 1 if by == "back" else number
                heads[metric] = f"{number}" if first == number else f"{first}\N{EN DASH}{number}"
            hinted = {
                metric: (head, hint_counts(study, [f"{metric}_items"], "answers"))
                for metric, head in heads.items()
            }
            caption = f"Right answers (%) {caption}"
            tables.append(scored_table(study, f"recall-{by}", caption, hinted))
    return doc.Section("Recall", (doc.Paragraph((note,)), *tables))
