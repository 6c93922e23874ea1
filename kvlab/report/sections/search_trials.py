"""What a search did: its space, sampler and budget, all trials, and what was not measured."""

from collections import Counter
from collections.abc import Iterator

from kvlab.analysis.search_results import SearchResults, SuggestedTrial
from kvlab.analysis.study import Study
from kvlab.humanize import format_count, format_duration, format_number
from kvlab.report.document import (
    EMPTY_CELL,
    Cell,
    Code,
    Column,
    Content,
    Row,
    Section,
    Span,
    Table,
    Tone,
    cell,
    paragraph,
)
from kvlab.report.formatting import format_metric, format_percent
from kvlab.report.search_tables import (
    cell_key,
    describe_limits,
    objective_title,
    row_of,
    settings_cells,
    settings_columns,
    trials_table,
)
from kvlab.spec.search_config import format_setting, split_sampler

MAX_REASON_LENGTH = 300
"""Characters of a reason that are shown."""


def report_search_setup(study: Study) -> Section:
    """Describe the space, the objectives, the sampler, the pruner and the budget."""
    search = study.search
    assert search is not None, "only for searches"
    goals = " and ".join(
        f"{'minimize' if one.is_minimized else 'maximize'} {objective_title(one.name)}"
        for one in search.objectives
    )
    limits = describe_limits(search)
    spans: list[Span] = [f"The search was to {goals}"]
    spans.append(f", with {limits}. " if limits else ". ")
    name, arguments = split_sampler(search.config["sampler"])
    sampler = [name, *(f"{key}={format_setting(value)}" for key, value in arguments.items())]
    spans += ["Suggestions came from Optuna's sampler ", Code(" ".join(sampler))]
    spans.append(f" with seed {search.config['seed']}, {search.config['parallel']} at once. ")
    spans.append(_describe_pruning(search))
    seeds = ", ".join(map(str, study.seeds))
    spans.append(
        f" All trials have seed {seeds}, so they saw the same text in the same order; trials that"
        " differ only in serving share a training."
    )
    return Section(
        "What was searched",
        (paragraph(*spans), _space_table(search), _budget_table(study, search)),
        is_appendix=True,
    )


def _describe_pruning(search: SearchResults) -> str:
    pruning = search.config.get("pruning")
    if pruning is None:
        return "Nothing was pruned: every trial was trained to its end."
    rungs = ", ".join(f"{fraction:.3g}" for fraction in pruning["rungs"])
    text = f"Trainings were pruned by validation loss at {rungs} of their steps: "
    if pruning["rule"] == "halving":
        return f"{text}one in {pruning['factor']} goes on (asynchronous successive halving)."
    others = pruning["startup"]
    return f"{text}what is worse than the median pauses, once {others} others have been there."


def _space_table(search: SearchResults) -> Table:
    rows = []
    for key, values in search.config["choices"].items():
        text = ", ".join(map(format_setting, values))
        rows.append(Row((Cell(key, key, code=True), cell("one of"), cell(text))))
    for key, interval in search.config["ranges"].items():
        kind = "whole numbers" if interval["whole"] else "numbers"
        kind += ", even in the logarithm" if interval["log"] else ""
        step = f", step {interval['step']:g}" if interval["step"] else ""
        text = f"{interval['low']:g} to {interval['high']:g}{step}"
        rows.append(Row((Cell(key, key, code=True), cell(kind), cell(text))))
    columns = (Column("parameter"), Column("kind"), Column("values"))
    return Table("space", "The space.", columns, tuple(rows))


def _budget_table(study: Study, search: SearchResults) -> Table:
    config = search.config
    tokens = _trained_tokens(study, search)
    lines = [
        ("suggestions", f"{len(search.suggestions):,}", len(search.suggestions), ""),
        ("trials", f"{len(search.trials):,}", len(search.trials), _limit(config.get("trials"))),
        (
            "training FLOPs",
            format_number(search.spent_flops),
            search.spent_flops,
            _limit(config.get("flops")),
        ),
        ("training tokens", f"{tokens:,}", tokens, ""),
        (
            "time of searching",
            format_duration(search.spent_seconds),
            search.spent_seconds,
            f"{config['hours']:g} hours" if config.get("hours") else "",
        ),
    ]
    rows = (Row((cell(name), cell(text, used), cell(limit))) for name, text, used, limit in lines)
    columns = (Column("what"), Column("used", True), Column("budget"))
    end = f"It ended: {search.stop_reason}." if search.stop_reason else "It has not ended."
    caption = f"The budget, without the base experiment. {end}"
    return Table("search-budget", caption, columns, tuple(rows))


def _limit(budget: float | None) -> str:
    return "" if budget is None else format_number(budget) if budget >= 1e6 else f"{budget:,}"


def _trained_tokens(study: Study, search: SearchResults) -> int:
    """Return the tokens of all trainings, each once, as far as it went."""
    tokens: dict[str, int] = {}
    for one in search.trials:
        row = row_of(study, one)
        if row is None or not row.training:
            continue
        record = row.record.get("training_record") or {}
        count = int(record.get("tokens") or 0)
        if row.status == "pruned":
            facts = row.record["pruned"]
            training = row.record["experiment"]["training"]
            count = int(facts["step"] * training["batch_tokens"])
        tokens[row.training] = max(tokens.get(row.training, 0), count)
    return sum(tokens.values())


def report_all_trials(study: Study) -> Section | None:
    """List every measured trial in the order of the suggestions."""
    search = study.search
    assert search is not None, "only for searches"
    measured = [one for one in search.trials if one.is_measured]
    if not measured:
        return None
    caption = "Every measured trial, in the order of the suggestions."
    table = trials_table(study, search, "trials", caption, measured)
    return Section("All trials", (table,), is_appendix=True)


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


def report_unmeasured(study: Study) -> Section:
    """Report the suggestions that cannot be the best, each with its reason."""
    search = study.search
    assert search is not None, "only for searches"
    others = [(one, _outcome(study, one)) for one in search.suggestions if not one.is_eligible]
    if not others:
        text = "Every suggestion was measured and keeps the limits. No trial failed."
        return Section("Pruned, failed and refused", (paragraph(text),), is_appendix=True)
    counts = Counter(kind for _, kind in others)
    listed = "; ".join(f"{counts[kind]:,} {_OUTCOMES[kind]}" for kind in _OUTCOMES if counts[kind])
    text = f"{len(others):,} of {format_count(len(search.suggestions), 'suggestion')}: {listed}."
    if counts["pruned"]:
        text += " A pruned trial was behind others in validation loss at the same share of its"
        text += " steps; whether it would have caught up is not known."
    if counts["failed"]:
        text += " A failure says nothing about its configuration."
    if not counts["failed"]:
        text += " No trial failed."
    contents: list[Content] = [paragraph(text)]
    rows = tuple(_other_row(study, search, one, kind) for one, kind in others)
    columns = (
        Column("trial", True),
        Column("what"),
        Column("why"),
        *settings_columns(search),
        Column("id"),
    )
    caption = "Suggestions that cannot be the best."
    return Section(
        "Pruned, failed and refused",
        (*contents, Table("not-measured", caption, columns, rows)),
        is_appendix=True,
    )


def _outcome(study: Study, one: SuggestedTrial) -> str:
    if one.reason.startswith("computes the same"):
        return "same"
    if one.reason.startswith("is not possible"):
        return "impossible"
    if one.state in ("pruned", "open"):
        return one.state
    row = row_of(study, one)
    if "diverged" in one.violations or (row is not None and row.status == "diverged"):
        return "diverged"
    if one.state == "lost":
        return "failed"
    return "broke" if one.is_measured else "limit"


def _other_row(study: Study, search: SearchResults, one: SuggestedTrial, kind: str) -> Row:
    why = "; ".join(_reasons(study, search, one, kind))
    shown = why if len(why) <= MAX_REASON_LENGTH else f"{why[:MAX_REASON_LENGTH]}..."
    tone: Tone = "bad" if kind in ("failed", "diverged") else ""
    return Row(
        (
            cell(str(one.number), one.number),
            cell(_OUTCOMES[kind], tone=tone),
            Cell(shown, why),
            *settings_cells(search, one),
            Cell(one.trial[:8], one.trial) if one.trial else EMPTY_CELL,
        ),
        cell_key(study, one),
        "" if tone else "muted",
    )


def _reasons(study: Study, search: SearchResults, one: SuggestedTrial, kind: str) -> Iterator[str]:
    row = row_of(study, one)
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
        step = f"step {facts['step']:,} of {facts['steps']:,}"
        yield f"validation loss {loss} nats/token after {step}"
    elif kind in ("failed", "diverged"):
        error = record.get("error") or {}
        lines = str(error.get("message") or "").splitlines()
        yield ": ".join(filter(None, [str(error.get("class") or ""), *lines[:1]]))
    else:
        for violation, share in one.violations.items():
            if share > 0:
                name, _, sign = violation.partition(" ")
                side = "above the limit" if sign.startswith("+") else "below the limit"
                yield f"{objective_title(name)} {format_percent(share)} {side}"
