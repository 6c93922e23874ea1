"""A search: its best configurations, how far to trust them, and what it did with its budget."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from kvlab.analysis.search_results import SearchResults, SuggestedTrial
from kvlab.analysis.study import Study
from kvlab.extensions.search import summary, tables
from kvlab.humanize import format_duration, format_number
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import table_columns as cols
from kvlab.report import texts
from kvlab.report.record_warnings import report_damage
from kvlab.spec.search_config import format_setting, format_settings, short_keys, split_sampler
from kvlab.store.metrics import METRICS

MAX_BEST = 10
"""Trials in the table of the best configurations; the table of all trials has the others."""

MAX_REASON_LENGTH = 300
"""Characters of a reason that are shown."""


def report_search_answer(study: Study, search: SearchResults) -> doc.Section:
    """Name the best configuration under every objective, and say what is not known about it."""
    contents: list[doc.Content] = [doc.paragraph(doc.Strong(str(study.sweep["question"])))]
    n_measured = sum(one.is_measured for one in search.trials)
    limits = tables.describe_limits(search)
    contents += report_damage(study)
    if search.eligible:
        contents += _describe_best(study, search, n_measured, limits)
    else:
        n = n_measured if limits else 0
        contents.append(texts.write("no trial in the limits", "lead", n=n, limits=limits))
    if not search.stop_reason:
        n_ended = sum(one.state != "open" for one in search.trials)
        contents.append(texts.write("search goes on", n=n_ended, of=search.config.get("trials")))
    return doc.Section("The answer", tuple(contents))


def _describe_best(
    study: Study, search: SearchResults, n_measured: int, limits: str
) -> Iterator[doc.Content]:
    names = [_name_best(study, search, number) for number in range(len(search.objectives))]
    first = names[0] if len(names) == 1 else ()
    fields = {"n_measured": n_measured, "limits": limits}
    lead = texts.spans("lead of a search", search=search, **fields)
    yield doc.Paragraph((*lead, *([" "] if first else []), *first), tone="lead")
    if not first:
        yield doc.Bullets(tuple(names))
    ranked, gap = search.ranked(0), ""
    if first and len(ranked) > 1:
        distance = abs(ranked[1].values[0] - ranked[0].values[0])
        gap = f"Trial {ranked[1].number} {_format_gap(search.objectives[0].name, distance)}"
    tuned = [key for key in search.keys if key.startswith("training.")]
    fields = {"n": len(search.eligible), "gap": gap, "tuned": tuned}
    yield texts.write("suggestion", seeds=study.seeds, **fields)


def _name_best(study: Study, search: SearchResults, number: int) -> tuple[doc.Span, ...]:
    """Name the best trial in one objective, its settings, and the base experiment's value."""
    objective, best, row = search.objectives[number], search.leader(number), tables.base_row(study)
    base = None if row is None else tables.objective_of_row(objective.name, row)
    fields = {
        "title": tables.objective_title(objective.name),
        "value": tables.format_with_unit(objective.name, best.values[number]),
        "settings": format_settings(best.settings),
        "base": "" if base is None else tables.format_with_unit(objective.name, base),
        "is_over": row is not None and tables.breaks_limit(search, row),
    }
    return texts.spans("best trial", objective=objective, best=best, **fields)


def _format_gap(name: str, gap: float) -> str:
    """Say how far a trial is behind the best."""
    if not gap:
        return f"has the same {tables.objective_title(name)}"
    unit = METRICS[name].unit if name in METRICS else "bytes"
    if unit == "bytes":
        return f"is behind it by {tables.format_with_unit(name, gap)}"
    return f"is behind it by {fmt.format_difference(name, gap).lstrip('+')} {unit or 'points'}"


def report_best_trials(study: Study, search: SearchResults) -> doc.Section | None:
    """List the best configurations with their settings."""
    if not search.eligible:
        return None
    is_ranked = len(search.objectives) == 1
    trials = tuple(search.ranked(0)[:MAX_BEST]) if is_ranked else search.best
    fields = {"is_ranked": is_ranked, "n": len(trials)}
    caption = texts.fill("caption of the best", base=tables.base_row(study), **fields)
    table = tables.trials_table(study, search, "best", caption, trials)
    return doc.Section("Best configurations", (table,))


def report_next_sweep(study: Study, search: SearchResults) -> doc.Section | None:
    """Give the sweep that confirms the best trials on fresh seeds."""
    sweep, path = summary.sweep_yaml(study, search), summary.sweep_path(study)
    if not sweep:
        return None
    count = len(summary.choose_trials(search))
    fields = {"n": count, "seeds": summary.SEEDS, "path": path, "sweep": study.name}
    note = texts.write("next sweep", search=search, **fields)
    return doc.Section("What to do next", (note, doc.Block(path, sweep, "yaml")))


# What was searched


def report_search_setup(study: Study, search: SearchResults) -> doc.Section:
    """Describe the space, the objectives, the sampler, the pruner and the budget."""
    titles = [tables.objective_title(one.name) for one in search.objectives]
    config = search.config
    name, arguments = split_sampler(config["sampler"])
    sampler = [name, *(f"{key}={format_setting(value)}" for key, value in arguments.items())]
    flops, time = format_number(search.spent_flops), format_duration(search.spent_seconds)
    fields = {"titles": titles, "sampler": " ".join(sampler), "flops": flops, "time": time}
    limits = tables.describe_limits(search)
    note = texts.write("search setup", study=study, search=search, limits=limits, **fields)
    space = [(k, "one of", ", ".join(map(format_setting, v))) for k, v in config["choices"].items()]
    for key, interval in config["ranges"].items():
        kind = "whole numbers" if interval["whole"] else "numbers"
        kind += ", even in the logarithm" if interval["log"] else ""
        step = f", step {interval['step']:g}" if interval["step"] else ""
        space.append((key, kind, f"{interval['low']:g} to {interval['high']:g}{step}"))
    rows = (
        ((("parameter", doc.Cell(key, key, code=True)), ("kind", kind), ("values", values)), "")
        for key, kind, values in space
    )
    contents = (note, doc.make_table("space", "The space.", rows))
    return doc.Section("What was searched", contents, is_appendix=True)


# All trials, and those without an answer


def report_all_trials(study: Study, search: SearchResults) -> doc.Section | None:
    """List every measured trial in the order of the suggestions."""
    measured = [one for one in search.trials if one.is_measured]
    if not measured:
        return None
    caption = "Every measured trial, in the order of the suggestions."
    table = tables.trials_table(study, search, "trials", caption, measured)
    return doc.Section("All trials", (table,), is_appendix=True)


_OUTCOMES = {
    "pruned": "pruned",
    "failed": "failed",
    "diverged": "diverged",
    "impossible": "not possible",
    "limit": "over a limit, so never trained",
    "broke": "measured, and over a limit",
    "same": "computes the same as an earlier one",
    "open": "not ended",
}
"""What became of a suggestion that cannot be the best, by kind."""


def report_unmeasured(study: Study, search: SearchResults) -> doc.Section:
    """Report the suggestions that cannot be the best, each with its reason."""
    others = [(one, _outcome(study, one)) for one in search.suggestions if not one.is_eligible]
    counts = Counter(kind for _, kind in others)
    named = [(counts[kind], _OUTCOMES[kind]) for kind in _OUTCOMES if counts[kind]]
    fields = {"n": len(others), "named": named, "counts": counts}
    note = texts.write("suggestions without an answer", search=search, **fields)
    contents: list[doc.Content] = [note]
    if others:

        def entries(one: SuggestedTrial, kind: str) -> doc.Entries:
            why = "; ".join(_reasons(study, search, one, kind))
            shown = why if len(why) <= MAX_REASON_LENGTH else f"{why[:MAX_REASON_LENGTH]}..."
            yield "trial", one.number
            tone: doc.Tone = "bad" if kind in ("failed", "diverged") else ""
            yield "what", doc.cell(_OUTCOMES[kind], tone=tone)
            yield "why", doc.Cell(shown, why)
            yield from tables.settings_entries(search, one.settings)
            yield "id", doc.Cell(one.trial[:8], one.trial) if one.trial else doc.EMPTY_CELL

        rows = (
            (entries(one, kind), tables.cell_key(study, one), kind not in ("failed", "diverged"))
            for one, kind in others
        )
        caption = "Suggestions that cannot be the best."
        contents.append(doc.make_table("not-measured", caption, rows))
    return doc.Section("Pruned, failed and refused", tuple(contents), is_appendix=True)


def _outcome(study: Study, one: SuggestedTrial) -> str:
    for start, outcome in (("computes the same", "same"), ("is not possible", "impossible")):
        if one.reason.startswith(start):
            return outcome
    if one.state in ("pruned", "open"):
        return one.state
    row = tables.row_of(study, one)
    if "diverged" in one.violations or (row is not None and row.status == "diverged"):
        return "diverged"
    if one.state == "lost":
        return "failed"
    return "broke" if one.is_measured else "limit"


def _reasons(study: Study, search: SearchResults, one: SuggestedTrial, kind: str) -> Iterator[str]:
    row = tables.row_of(study, one)
    record = {} if row is None else row.record
    if kind == "same":
        level = one.reason.rpartition(" ")[2]
        earlier = search.by_level.get(level)
        yield f"as {f'trial {earlier.number}' if earlier else level}"
    elif kind == "impossible":
        yield one.reason.partition(": ")[2]
    elif kind == "pruned" and "pruned" in record:
        facts = record["pruned"]
        loss = fmt.format_metric("loss", facts["loss"])
        place = f"after step {facts['step']:,} of {facts['steps']:,}"
        yield f"validation loss {loss} nats/token {place}"
    elif kind in ("failed", "diverged"):
        error = record.get("error") or {}
        lines = str(error.get("message") or "").splitlines()
        if row is not None and row.status == "done":
            lines = ["it does not measure every objective and limit"]
        yield ": ".join(filter(None, [str(error.get("class") or ""), *lines[:1]]))
    else:
        for violation, share in one.violations.items():
            if share > 0:
                name, _, sign = violation.partition(" ")
                side = "above the limit" if sign.startswith("+") else "below the limit"
                yield f"{tables.objective_title(name)} {fmt.format_percent(share)} {side}"


# Figures, and what mattered

MAX_LABELS = 12
"""Marks that are named by the trial's number."""


def report_search_history(study: Study, search: SearchResults) -> doc.Section | None:
    """Plot every measured trial and the best so far, one figure an objective."""
    if not search.eligible:
        return None
    note = texts.write("history", search=search, last=search.improvements(0)[-1])
    numbers = range(len(search.objectives))
    figures = (_history_figure(study, search, number) for number in numbers)
    return doc.Section("History", (note, *figures))


def _history_figure(study: Study, search: SearchResults, number: int) -> doc.Figure:
    name, improved = search.objectives[number].name, search.improvements(number)
    others = [one for one in search.eligible if one not in improved]
    beyond = [one for one in search.trials if one.is_measured and not one.is_eligible]

    def marks(trials: Sequence[SuggestedTrial], is_labelled: bool = False) -> tuple[doc.Point, ...]:
        return tuple(_mark(study, search, t, t.number, number, is_labelled) for t in trials)

    steps = doc.draw_steps(
        (one.number, tables.in_objective_unit(name, one.values[number])) for one in improved
    )
    steps += (doc.Point(search.suggestions[-1].number, steps[-1].y),)
    plot = doc.Plot(
        doc.Axis("suggestion"),
        doc.Axis(tables.title_with_unit(name)),
        (
            doc.Points("beyond a limit", marks(beyond), "muted", "ring"),
            doc.Line("", steps, "c0"),
            doc.Points("measured", marks(others), "c0", "ring"),
            doc.Points("best so far", marks(improved, len(improved) <= MAX_LABELS), "c0", "dot"),
        ),
    )
    caption = f"{fmt.capitalize(tables.objective_title(name))} of every measured trial, in order."
    first, last = (tables.format_with_unit(name, improved[end].values[number]) for end in (0, -1))
    alt = f"{caption} The first is {first}, the best {last}, of trial {improved[-1].number}."
    stem = f"history-{name.replace('_', '-')}"
    return doc.Figure(stem, caption, alt, plot, len(search.objectives) > 1)


def _mark(
    study: Study,
    search: SearchResults,
    one: SuggestedTrial,
    x: float,
    number: int,
    is_labelled: bool,
) -> doc.Point:
    """Return a trial's mark at an x, with its objective of this number as y."""
    names = (objective.name for objective in search.objectives)
    values = map(tables.format_named, names, one.values)
    tip = (f"trial {one.number}", format_settings(one.settings), *values)
    y = tables.in_objective_unit(search.objectives[number].name, one.values[number])
    label = str(one.number) if is_labelled else ""
    return doc.Point(x, y, tip, tables.cell_key(study, one), label)


def report_search_front(study: Study, search: SearchResults) -> doc.Section | None:
    """Plot the objectives against each other; with one, against the bytes of the cache."""
    if not search.eligible:
        return None
    if len(search.objectives) == 1:
        return _report_memory(study, search)
    contents: list[doc.Content] = [texts.write("front", search=search)]
    y_name = search.objectives[0].name
    for number, objective in enumerate(search.objectives[1:], start=1):
        costs = {one.number: one.values[number] for one in search.trials if one.is_measured}
        stem = f"front-{y_name}-{objective.name}".replace("_", "-")
        best = "on the front", search.best
        contents.append(_front_figure(study, search, stem, objective.name, costs, *best))
    return doc.Section("Front", tuple(contents))


def _front_figure(
    study: Study,
    search: SearchResults,
    stem: str,
    x_name: str,
    costs: Mapping[int, float],
    best_title: str,
    best: Sequence[SuggestedTrial],
) -> doc.Figure:
    """Plot the first objective against a cost.

    Args:
        x_name: Name of the cost, an objective or what could be one.
        costs: Number of a measured trial -> its cost; without those that have none.
    """
    y_name = search.objectives[0].name
    others = [one for one in search.trials if one.number in costs and one not in best]

    def mark(one: SuggestedTrial, is_labelled: bool) -> doc.Point:
        cost = costs[one.number]
        x, named = tables.in_objective_unit(x_name, cost), tables.format_named(x_name, cost)
        point = _mark(study, search, one, x, 0, is_labelled)
        return replace(point, tip=tuple(dict.fromkeys((*point.tip, named))))

    base, base_marks = tables.base_row(study), list[doc.Point]()
    x, y = (None if base is None else tables.objective_of_row(n, base) for n in (x_name, y_name))
    if x is not None and y is not None:
        named = ((x_name, x), (y_name, y))
        tip = ("base experiment", *(tables.format_with_unit(*one) for one in named))
        x, y = (tables.in_objective_unit(*one) for one in named)
        base_marks.append(doc.Point(x, y, tip, study.cell_key(study.baseline), "base"))
    x_axis = doc.Axis(tables.title_with_unit(x_name))
    if x_name.startswith("kv_bytes"):
        x_axis = doc.Axis(tables.objective_title(x_name), "bytes")
    plot = doc.Plot(
        x_axis,
        doc.Axis(tables.title_with_unit(y_name)),
        (
            doc.Points("other trials", tuple(mark(o, False) for o in others), "muted", "ring"),
            doc.Points(best_title, tuple(mark(o, True) for o in best), "c0", "dot"),
            doc.Points("base experiment", tuple(base_marks), "c1", "diamond"),
        ),
    )
    title = fmt.capitalize(tables.objective_title(y_name))
    caption = f"{title} against {tables.objective_title(x_name)}."
    listed = "; ".join(
        f"trial {one.number}: {tables.format_with_unit(x_name, costs[one.number])},"
        f" {tables.format_with_unit(y_name, one.values[0])}"
        for one in best[:MAX_LABELS]
    )
    return doc.Figure(stem, caption, f"{caption} {best_title.capitalize()}: {listed}.", plot)


def _report_memory(study: Study, search: SearchResults) -> doc.Section | None:
    """Report the best trial of every size of the cache: a figure and a table."""
    objective = search.objectives[0]
    sizes: dict[int, float] = {}
    for one in search.trials:
        row = tables.row_of(study, one)
        size = None if row is None else tables.objective_of_row("kv_bytes", row)
        if one.is_measured and size is not None:
            sizes[one.number] = size
    best, least = [], float("inf")  # better than every one with a cache of at most their size
    fitting = [one for one in search.eligible if one.number in sizes]
    for one in sorted(fitting, key=lambda t: (sizes[t.number], objective.loss(t.values[0]))):
        if objective.loss(one.values[0]) < least:
            least = objective.loss(one.values[0])
            best.append(one)
    if objective.name.startswith("kv_bytes") or len(set(sizes.values())) < 2 or not best:
        return None
    title = "best of its size or smaller"
    figure = _front_figure(study, search, "front-memory", "kv_bytes", sizes, title, best)

    def entries(one: SuggestedTrial) -> doc.Entries:
        yield cols.size_column("cache at most"), cols.size_cell(round(sizes[one.number]))
        yield "trial", one.number
        yield tables.objective_entry(objective.name, one.values[0])
        yield "settings", doc.cell(format_settings(one.settings))

    rows = ((entries(one), tables.cell_key(study, one)) for one in best)
    table = doc.make_table("best-by-memory", "The best trial within every size of the cache.", rows)
    return doc.Section("Quality against memory", (texts.write("best by memory"), figure, table))


def report_importances(_study: Study, search: SearchResults) -> doc.Section | None:
    """Report how much of the variation of every objective each parameter explains."""
    if not search.importances:
        return None
    n_measured = sum(one.is_measured for one in search.trials)
    note = texts.write("importances", n=n_measured)
    names = short_keys(search.keys)

    def entries(key: str) -> doc.Entries:
        yield "setting", doc.cell(names.get(key, key))
        for objective, shares in search.importances.items():
            column = doc.Column(tables.objective_title(objective), True)
            yield column, cols.number_cell(shares.get(key), fmt.format_percent)

    keys = dict.fromkeys(key for shares in search.importances.values() for key in shares)
    caption = "Share of the variation of each objective that a setting explains."
    table = doc.make_table("importances", caption, ((entries(key), "") for key in keys))
    return doc.Section("What mattered", (note, table))
