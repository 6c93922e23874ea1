"""The answer of a search: its best configurations, how far to trust them, and what to do next."""

from kvlab.analysis.search_results import Objective, SearchResults, SuggestedTrial
from kvlab.analysis.study import Study
from kvlab.humanize import format_count
from kvlab.report.confirmation import (
    CONFIRMATION_SEEDS,
    confirmation_path,
    confirmation_yaml,
    trials_to_confirm,
)
from kvlab.report.document import (
    Block,
    Bullets,
    Code,
    Content,
    Paragraph,
    Section,
    Span,
    Strong,
    paragraph,
)
from kvlab.report.formatting import format_difference
from kvlab.report.search_tables import (
    base_row,
    breaks_limit,
    describe_limits,
    format_with_unit,
    objective_of_row,
    objective_title,
    trials_table,
)
from kvlab.spec.search_config import format_settings
from kvlab.store.metrics import METRICS

MAX_BEST = 10
"""Trials in the table of the best configurations; the table of all trials has the others."""


def report_search_answer(study: Study) -> Section:
    """Name the best configuration under every objective, and say what is not known about it."""
    search = study.search
    assert search is not None, "only for searches"
    contents: list[Content] = [paragraph(Strong(str(study.sweep["question"])))]
    contents += _describe_best(study, search) if search.eligible else [_describe_nothing(search)]
    if not search.stop_reason:
        ended = sum(one.state != "open" for one in search.trials)
        planned = search.config.get("trials")
        of_budget = f" of {format_count(planned, 'trial')}" if planned else ""
        text = f" {ended:,}{of_budget} ended; every number here is of those."
        text += " Submit it again to go on."
        contents.append(paragraph(Strong("The search has not ended:"), text))
    return Section("The answer", tuple(contents))


def _describe_best(study: Study, search: SearchResults) -> list[Content]:
    measured = [one for one in search.trials if one.is_measured]
    limits = describe_limits(search)
    text = f"The search measured {format_count(len(measured), 'configuration')}"
    if limits:
        count = len(search.eligible)
        who = "all" if count == len(measured) else f"{count:,} of them"
        verb = "keeps" if count == 1 else "keep"
        text += f"; {who} {verb} the limit{'s' if ' and ' in limits else ''} ({limits})"
    if len(search.objectives) == 1:
        return [
            Paragraph((f"{text}. ", *_best_spans(study, search, 0), "."), tone="lead"),
            _describe_trust(study, search),
        ]
    front = f"No other trial beats these {len(search.best)}: they are the front"
    if len(search.best) == 1:
        front = "One trial beats all others in every objective"
    bullets = tuple(
        (*_best_spans(study, search, number), ".") for number in range(len(search.objectives))
    )
    lead = Paragraph((f"{text}. {front}.",), tone="lead")
    return [lead, Bullets(bullets), _describe_trust(study, search)]


def _best_spans(study: Study, search: SearchResults, number: int) -> list[Span]:
    """Name the best trial in one objective, its settings, and the base experiment's value."""
    objective, best = search.objectives[number], search.leader(number)
    extreme = "lowest" if objective.is_minimized else "highest"
    value = format_with_unit(objective.name, best.values[number])
    spans: list[Span] = [
        f"The {extreme} {objective_title(objective.name)} is {value}, of ",
        Strong(f"trial {best.number}"),
        ": ",
        Code(format_settings(best.settings)),
    ]
    base = base_row(study)
    base_value = None if base is None else objective_of_row(objective.name, base)
    if base is not None and base_value is not None:
        spans.append(f". The base experiment is at {format_with_unit(objective.name, base_value)}")
        spans.append(", and over a limit" if breaks_limit(search, base) else "")
    return spans


def _describe_trust(study: Study, search: SearchResults) -> Paragraph:
    """Say that one seed and selection make the best look better than it is."""
    seeds = ", ".join(map(str, study.seeds))
    text = f" every trial ran once, at seed {seeds}."
    if len(search.eligible) > 1:
        text = f" every trial ran once, at seed {seeds}, and the best of {len(search.eligible):,}"
        text += " noisy numbers looks better than it is."
    gap, ranked = "", search.ranked(0)
    if len(search.objectives) == 1 and len(ranked) > 1:
        distance = _format_gap(search.objectives[0], ranked[0], ranked[1])
        gap = f" Trial {ranked[1].number} is behind it by {distance}."
        if not distance:
            title = objective_title(search.objectives[0].name)
            gap = f" Trial {ranked[1].number} has the same {title}."
    tuned = [key for key in search.keys if key.startswith("training.")]
    if tuned:
        gap += f" The search also tuned {' and '.join(tuned)}, which the base experiment has as"
        gap += " written, so part of a difference from it may be the recipe's."
    hint = " Confirm the best on fresh seeds (What to do next) before you rely on it."
    return paragraph(Strong("This is a suggestion, not a finding:"), f"{text}{gap}{hint}")


def _format_gap(objective: Objective, best: SuggestedTrial, other: SuggestedTrial) -> str:
    """Return the distance of two trials with its unit; empty if they are equal."""
    gap = abs(other.values[0] - best.values[0])
    if not gap:
        return ""
    unit = METRICS[objective.name].unit if objective.name in METRICS else "bytes"
    if unit == "bytes":
        return format_with_unit(objective.name, gap)
    text = format_difference(objective.name, gap).lstrip("+")
    return f"{text} {unit}" if unit else f"{text} points"


def _describe_nothing(search: SearchResults) -> Paragraph:
    """Say why no trial can be the best."""
    measured = sum(one.is_measured for one in search.trials)
    limits = describe_limits(search)
    if measured and limits:
        count = format_count(measured, "measured trial")
        text = f"None of {count} keeps the limits ({limits}), so there is no answer. Relax a limit,"
        text += " widen the space, or give the search more trials."
    else:
        text = "No trial has been measured yet, so there is no answer."
    return Paragraph((text,), tone="lead")


def report_best_trials(study: Study) -> Section | None:
    """List the best configurations with their settings."""
    search = study.search
    assert search is not None, "only for searches"
    if not search.eligible:
        return None
    if len(search.objectives) == 1:
        trials = search.ranked(0)[:MAX_BEST]
        caption = f"The best {format_count(len(trials), 'trial')}, one seed each"
        if len(trials) == 1:
            caption = "The only trial within the limits, at one seed"
    else:
        trials = list(search.best)
        caption = "The trials that no other beats, one seed each"
    if base_row(study) is not None:
        caption += "; last, the base experiment for comparison"
    table = trials_table(study, search, "best", f"{caption}.", trials)
    return Section("Best configurations", (table,))


def report_next_sweep(study: Study) -> Section | None:
    """Give the sweep that confirms the best trials on fresh seeds."""
    search = study.search
    assert search is not None, "only for searches"
    text = confirmation_yaml(study, search)
    if not text:
        return None
    count, path = len(trials_to_confirm(search)), confirmation_path(study)
    n_trials = f"{(count + 1) * CONFIRMATION_SEEDS}"
    which = "the best trial" if count == 1 else f"the best {count} trials"
    if len(search.objectives) > 1:
        which = "the one trial of the front" if count == 1 else f"{count} trials of the front"
    return Section(
        "What to do next",
        (
            paragraph(
                f"Compare {which} with the base experiment on {CONFIRMATION_SEEDS} fresh seeds."
                f" That takes {n_trials} trials, paired by seed, with simultaneous intervals. Save"
                " the sweep below beside the search's own file, or let ",
                Code(f"kvlab report {study.name} --confirm {path}"),
                " write it. Then run ",
                Code(f"kvlab submit {path}"),
                ".",
            ),
            Block(path, text, "yaml"),
        ),
    )
