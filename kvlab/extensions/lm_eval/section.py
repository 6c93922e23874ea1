"""The report's section of lm-eval's tasks: their metrics, and cells compared item by item."""

import math
from collections.abc import Sequence

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.extensions.lm_eval.names import PREFIX
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import hellaswag_outcomes as hellaswag
from kvlab.report import table_columns as cols
from kvlab.report import texts
from kvlab.report.sections.tasks import compare_items
from kvlab.store.metrics import METRICS


def report_lm_eval(study: Study) -> doc.Section | None:
    """List the tasks' metrics and compare every cell with the baseline on the same items."""
    names = [name for name in study.measured_metrics if name.startswith(PREFIX)]
    metrics = [name for name in names if METRICS[name].unit != "items"]
    if not metrics:
        return None
    outcomes, n_dropped = _read_outcomes(study, metrics)
    listed = []
    for name in names:
        if METRICS[name].unit == "items":
            task = name.removeprefix(PREFIX).removesuffix("_items")
            count = max(int(row.measurements.get(name, 0)) for row in study.done_rows)
            listed.append((task, count))
    note = texts.write("lm-eval", tasks=listed, n_dropped=n_dropped)

    def entries(levels: Levels) -> doc.Entries:
        for metric in metrics:
            unit = "%" if fmt.is_share(metric) else METRICS[metric].unit
            title = f"{METRICS[metric].title.removeprefix('lm-eval ')} ({unit})"
            mean, rows = study.mean(levels, metric), study.cells[levels].values()
            answers = [a for row in rows if (a := outcomes.get(metric, {}).get(row.trial))]
            cell = cols.mean_cell(study, levels, metric)
            if mean is not None and answers and len(answers[0]) > 1:
                error = math.sqrt(max(0.0, mean * (1 - mean)) / (len(answers[0]) - 1))
                cell = cols.error_cell(metric, mean, error)
            yield doc.Column(title, True, csv=(title, f"{title}, error")), cell

    table = cols.cells_table(study, "lm-eval", texts.fill("caption of lm-eval"), entries)
    contents: list[doc.Content] = [note, table]
    titles = {name: (name.replace("_", "-"), METRICS[name].title) for name in outcomes}
    contents += compare_items(study, outcomes, titles, "Tasks, item by item")
    return doc.Section("Tasks of lm-eval", tuple(contents))


def _read_outcomes(study: Study, metrics: Sequence[str]) -> tuple[hellaswag.Outcomes, int]:
    """Return the outcomes that are right or wrong, by item.

    Trials that answered other items of a task than the baseline did are left out, and counted.
    """
    rows = {row.trial: row for row in study.done_rows}
    tasks_by_trial = {trial: study.store.details(row.trial, "tasks") for trial, row in rows.items()}
    base = [row.trial for row in study.cells[study.baseline].values() if row.trial in rows]
    items: dict[str, str] = {}
    for trial in [*base, *tasks_by_trial]:
        for task, entry in tasks_by_trial[trial].items():
            items.setdefault(task, entry["items"])
    outcomes: hellaswag.Outcomes = {}
    dropped = set()
    for trial, tasks in tasks_by_trial.items():
        for task, entry in tasks.items():
            if entry["items"] != items[task]:
                dropped.add(trial)
                continue
            for metric, values in entry["outcomes"].items():
                if metric in metrics and fmt.is_share(metric) and set(values) <= {0, 1}:
                    outcomes.setdefault(metric, {})[trial] = bytes(map(int, values))
    return {metric: outcomes[metric] for metric in metrics if metric in outcomes}, len(dropped)
