"""A search: its best configurations, how far to trust them, and what it did with its budget."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from kvlab.analysis.search_results import Objective, SearchResults, SuggestedTrial
from kvlab.analysis.study import Study
from kvlab.humanize import format_count, format_duration, format_number
from kvlab.report import confirmation, texts
from kvlab.report import document as doc
from kvlab.report import search_tables as tables
from kvlab.report.formatting import format_difference, format_metric, format_percent
from kvlab.spec.search_config import format_setting, format_settings, split_sampler
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
    if search.eligible:
        contents += _describe_best(study, search)
    else:
        text = "No trial has been measured yet, so there is no answer."
        if n_measured and limits:
            count = format_count(n_measured, "measured trial")
            text = texts.fill("no trial in the limits", trials=count, limits=limits)
        contents.append(doc.Paragraph((text,), tone="lead"))
    if not search.stop_reason:
        ended = sum(one.state != "open" for one in search.trials)
        planned = search.config.get("trials")
        of_budget = f" of {format_count(planned, 'trial')}" if planned else ""
        text = (
            f" {ended:,}{of_budget} ended; every number here is of those. Submit it again to go on."
        )
        contents.append(doc.paragraph(doc.Strong("The search has not ended:"), text))
    return doc.Section("The answer", tuple(contents))


def _describe_best(study: Study, search: SearchResults) -> Iterator[doc.Content]:
    n_measured = sum(one.is_measured for one in search.trials)
    text = f"The search measured {format_count(n_measured, 'configuration')}"
    if limits := tables.describe_limits(search):
        count = len(search.eligible)
        who = "all" if count == n_measured else f"{count:,} of them"
        verb = "keeps" if count == 1 else "keep"
        text += f"; {who} {verb} the limit{'s' if ' and ' in limits else ''} ({limits})"
    if len(search.objectives) == 1:
        yield doc.Paragraph((f"{text}. ", *_name_best(study, search, 0), "."), tone="lead")
    else:
        front = f"No other trial beats these {len(search.best)}: they are the front"
        if len(search.best) == 1:
            front = "One trial beats all others in every objective"
        yield doc.Paragraph((f"{text}. {front}.",), tone="lead")
        numbers = range(len(search.objectives))
        yield doc.Bullets(tuple((*_name_best(study, search, number), ".") for number in numbers))
    seeds = ", ".join(map(str, study.seeds))
    text = f" every trial ran once, at seed {seeds}"
    if len(search.eligible) > 1:
        text += f", and the best of {len(search.eligible):,} noisy numbers looks better than it is"
    ranked = search.ranked(0)
    if len(search.objectives) == 1 and len(ranked) > 1:
        distance = _format_gap(search.objectives[0], ranked[0], ranked[1])
        text += f". Trial {ranked[1].number} {distance}"
    if tuned := " and ".join(key for key in search.keys if key.startswith("training.")):
        text += f". The search also tuned {tuned}, which the base experiment has as written, so"
        text += " part of a difference from it may be the recipe's"
    hint = ". Confirm the best on fresh seeds (What to do next) before you rely on it."
    yield doc.paragraph(doc.Strong("This is a suggestion, not a finding:"), text + hint)


def _name_best(study: Study, search: SearchResults, number: int) -> Iterator[doc.Span]:
    """Name the best trial in one objective, its settings, and the base experiment's value."""
    objective, best = search.objectives[number], search.leader(number)
    extreme = "lowest" if objective.is_minimized else "highest"
    value = tables.format_with_unit(objective.name, best.values[number])
    yield f"The {extreme} {tables.objective_title(objective.name)} is {value}, of "
    yield doc.Strong(f"trial {best.number}")
    yield ": "
    yield doc.Code(format_settings(best.settings))
    base = tables.base_row(study)
    base_value = None if base is None else tables.objective_of_row(objective.name, base)
    if base is not None and base_value is not None:
        over = ", and over a limit" if tables.breaks_limit(search, base) else ""
        value = tables.format_with_unit(objective.name, base_value)
        yield f". The base experiment is at {value}{over}"


def _format_gap(objective: Objective, best: SuggestedTrial, other: SuggestedTrial) -> str:
    """Say how far a trial is behind the best."""
    name, gap = objective.name, abs(other.values[0] - best.values[0])
    if not gap:
        return f"has the same {tables.objective_title(name)}"
    unit = METRICS[name].unit if name in METRICS else "bytes"
    if unit == "bytes":
        return f"is behind it by {tables.format_with_unit(name, gap)}"
    return f"is behind it by {format_difference(name, gap).lstrip('+')} {unit or 'points'}"


def report_best_trials(study: Study, search: SearchResults) -> doc.Section | None:
    """List the best configurations with their settings."""
    if not search.eligible:
        return None
    trials, caption = search.best, "The trials that no other beats, one seed each"
    if len(search.objectives) == 1:
        trials = tuple(search.ranked(0)[:MAX_BEST])
        caption = f"The best {format_count(len(trials), 'trial')} within the limits, one seed each"
    if tables.base_row(study) is not None:
        caption += "; last, the base experiment for comparison"
    table = tables.trials_table(study, search, "best", f"{caption}.", trials)
    return doc.Section("Best configurations", (table,))


def report_next_sweep(study: Study, search: SearchResults) -> doc.Section | None:
    """Give the sweep that confirms the best trials on fresh seeds."""
    sweep, path = confirmation.sweep_yaml(study, search), confirmation.sweep_path(study)
    if not sweep:
        return None
    count, seeds = len(confirmation.choose_trials(search)), confirmation.SEEDS
    which = "the best" if len(search.objectives) == 1 else "of the front"
    trials = f"{format_count(count, 'trial')} ({which})"
    text = texts.fill("next sweep", trials=trials, seeds=seeds, total=(count + 1) * seeds)
    note = doc.paragraph(
        f"{text} ",
        doc.Code(f"kvlab report {study.name} --confirm {path}"),
        " write it. Then run ",
        doc.Code(f"kvlab submit {path}"),
        ".",
    )
    return doc.Section("What to do next", (note, doc.Block(path, sweep, "yaml")))


# What was searched


def report_search_setup(study: Study, search: SearchResults) -> doc.Section:
    """Describe the space, the objectives, the sampler, the pruner and the budget."""
    goals = " and ".join(
        f"{'minimize' if one.is_minimized else 'maximize'} {tables.objective_title(one.name)}"
        for one in search.objectives
    )
    limits, config = tables.describe_limits(search), search.config
    with_limits = f", with {limits}" if limits else ""
    name, arguments = split_sampler(config["sampler"])
    sampler = [name, *(f"{key}={format_setting(value)}" for key, value in arguments.items())]
    text = texts.fill(
        "search setup",
        seed=config["seed"],
        parallel=config["parallel"],
        pruning=_describe_pruning(config.get("pruning")),
        seeds=", ".join(map(str, study.seeds)),
    )
    start = f"The search was to {goals}{with_limits}. Suggestions came from Optuna's sampler "
    note = doc.paragraph(start, doc.Code(" ".join(sampler)), f" {text}")
    space = [
        (key, "one of", ", ".join(map(format_setting, v))) for key, v in config["choices"].items()
    ]
    for key, interval in config["ranges"].items():
        kind = "whole numbers" if interval["whole"] else "numbers"
        kind += ", even in the logarithm" if interval["log"] else ""
        step = f", step {interval['step']:g}" if interval["step"] else ""
        space.append((key, kind, f"{interval['low']:g} to {interval['high']:g}{step}"))
    heads = ("parameter", "kind", "values")
    rows = [
        doc.KeyedRow(zip(heads, (doc.Cell(key, key, code=True), kind, values), strict=True))
        for key, kind, values in space
    ]
    contents = (note, doc.make_table("space", "The space.", rows), _budget_table(study, search))
    return doc.Section("What was searched", contents, is_appendix=True)


def _describe_pruning(pruning: Mapping[str, Any] | None) -> str:
    if pruning is None:
        return "Nothing was pruned: every trial was trained to its end."
    rungs = ", ".join(f"{fraction:.3g}" for fraction in pruning["rungs"])
    text = f"Trainings were pruned by validation loss at {rungs} of their steps: "
    if pruning["rule"] == "halving":
        return f"{text}one in {pruning['factor']} goes on (asynchronous successive halving)."
    others = pruning["startup"]
    return f"{text}what is worse than the median pauses, once {others} others have been there."


def _budget_table(study: Study, search: SearchResults) -> doc.Table:
    limits = {
        name: "" if budget is None else format_number(budget) if budget >= 1e6 else f"{budget:,}"
        for name in ("trials", "flops")
        for budget in [search.config.get(name)]
    }
    hours, seconds, flops = search.config.get("hours"), search.spent_seconds, search.spent_flops
    time, hours_text = format_duration(seconds), f"{hours:g} hours" if hours else ""
    lines: tuple[tuple[str, doc.Cell | int, str], ...] = (
        ("suggestions", len(search.suggestions), ""),
        ("trials", len(search.trials), limits["trials"]),
        ("training FLOPs", doc.cell(format_number(flops), flops), limits["flops"]),
        ("training tokens", _trained_tokens(study, search), ""),
        ("time of searching", doc.cell(time, seconds), hours_text),
    )
    end = f"It ended: {search.stop_reason}." if search.stop_reason else "It has not ended."
    caption = f"The budget, without the base experiment. {end}"
    rows = [doc.KeyedRow(zip(("what", "used", "budget"), line, strict=True)) for line in lines]
    return doc.make_table("search-budget", caption, rows)


def _trained_tokens(study: Study, search: SearchResults) -> int:
    """Return the tokens of all trainings, each once, as far as it went."""
    tokens: dict[str, int] = {}
    for one in search.trials:
        row = tables.row_of(study, one)
        if row is None or not row.training:
            continue
        record = row.record.get("training_record") or {}
        count = int(record.get("tokens") or 0)
        if row.status == "pruned":
            training = row.record["experiment"]["training"]
            count = int(row.record["pruned"]["step"] * training["batch_tokens"])
        tokens[row.training] = max(tokens.get(row.training, 0), count)
    return sum(tokens.values())


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
    listed = "; ".join(f"{counts[kind]:,} {_OUTCOMES[kind]}" for kind in _OUTCOMES if counts[kind])
    text = f"{len(others):,} of {format_count(len(search.suggestions), 'suggestion')}: {listed}."
    if not others:
        text = "Every suggestion was measured and keeps the limits."
    if counts["pruned"]:
        text += " A pruned trial was behind others in validation loss at the same share of its"
        text += " steps; whether it would have caught up is not known."
    failed = " A failure says nothing about its configuration."
    text += failed if counts["failed"] else " No trial failed."
    contents: list[doc.Content] = [doc.paragraph(text)]
    if others:
        rows = (
            doc.KeyedRow(
                _outcome_entries(study, search, one, kind),
                tables.cell_key(study, one),
                "" if kind in ("failed", "diverged") else "muted",
            )
            for one, kind in others
        )
        contents.append(
            doc.make_table("not-measured", "Suggestions that cannot be the best.", rows)
        )
    return doc.Section("Pruned, failed and refused", tuple(contents), is_appendix=True)


def _outcome(study: Study, one: SuggestedTrial) -> str:
    if one.reason.startswith("computes the same"):
        return "same"
    if one.reason.startswith("is not possible"):
        return "impossible"
    if one.state in ("pruned", "open"):
        return one.state
    row = tables.row_of(study, one)
    if "diverged" in one.violations or (row is not None and row.status == "diverged"):
        return "diverged"
    if one.state == "lost":
        return "failed"
    return "broke" if one.is_measured else "limit"


def _outcome_entries(
    study: Study, search: SearchResults, one: SuggestedTrial, kind: str
) -> doc.Entries:
    why = "; ".join(_reasons(study, search, one, kind))
    shown = why if len(why) <= MAX_REASON_LENGTH else f"{why[:MAX_REASON_LENGTH]}..."
    yield "trial", one.number
    tone: doc.Tone = "bad" if kind in ("failed", "diverged") else ""
    yield "what", doc.cell(_OUTCOMES[kind], tone=tone)
    yield "why", doc.Cell(shown, why)
    yield from tables.settings_entries(search, one.settings)
    yield "id", doc.Cell(one.trial[:8], one.trial) if one.trial else doc.EMPTY_CELL


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
        loss = format_metric("loss", facts["loss"])
        yield (
            f"validation loss {loss} nats/token after step {facts['step']:,} of {facts['steps']:,}"
        )
    elif kind in ("failed", "diverged"):
        error = record.get("error") or {}
        lines = str(error.get("message") or "").splitlines()
        yield ": ".join(filter(None, [str(error.get("class") or ""), *lines[:1]]))
    else:
        for violation, share in one.violations.items():
            if share > 0:
                name, _, sign = violation.partition(" ")
                side = "above the limit" if sign.startswith("+") else "below the limit"
                yield f"{tables.objective_title(name)} {format_percent(share)} {side}"
