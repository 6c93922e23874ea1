"""How a search was done, for the methods of a paper: space, sampler, pruning, budget, outcomes."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from kvlab.analysis.search_results import SearchResults
from kvlab.analysis.study import Study
from kvlab.humanize import format_duration
from kvlab.report.formatting import format_percent
from kvlab.report.paper_text import cite, count_noun, format_latex_number, join
from kvlab.report.search_tables import describe_limits, objective_title
from kvlab.report.table_export import escape_latex
from kvlab.spec.search_config import format_setting, short_keys, split_sampler

_SAMPLERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tpe": ("a tree-structured Parzen estimator", ("bergstra2011algorithms",)),
    "gp": ("a Gaussian process", ()),
    "nsgaii": ("NSGA-II", ("deb2002nsga2",)),
    "nsgaiii": ("NSGA-III", ("deb2014nsga3",)),
    "qmc": ("a quasi-random sequence", ()),
    "random": ("uniform random draws", ()),
    "grid": ("the points of a grid in random order", ()),
    "bruteforce": ("every point of the space in random order", ()),
}
"""Optuna's class without its ending -> its words and what to cite. Others are named as they are."""

_OUTCOMES = {
    "ok": "measured within the limits",
    "repeated": "the same as earlier ones",
    "beyond": "beyond a limit (or diverged, or impossible)",
    "pruned": "pruned",
    "lost": "failed",
    "open": "not ended",
}


def describe_search(study: Study) -> Iterator[str]:
    """Yield sentences about a search, with the numbers of its record."""
    search = study.search
    assert search is not None, "only for searches"
    yield _describe_space(search)
    yield _describe_goals(search)
    if search.config.get("pruning"):
        yield _describe_pruning(search.config["pruning"])
    yield from _describe_outcomes(study, search)
    yield from _describe_importances(search)


def _describe_space(search: SearchResults) -> str:
    names = short_keys(search.keys)
    parts = [
        f"{escape_latex(names[key])} of {join(escape_latex(format_setting(v)) for v in values)}"
        for key, values in search.config["choices"].items()
    ]
    for key, interval in search.config["ranges"].items():
        low, high = (format_latex_number(interval[end]) for end in ("low", "high"))
        kind = ", evenly in the logarithm" if interval["log"] else ""
        step = f" in steps of {format_latex_number(interval['step'])}" if interval["step"] else ""
        parts.append(f"{escape_latex(names[key])} from {low} to {high}{step}{kind}")
    return f"The space of the search has {count_noun(len(parts), 'setting')}: {'; '.join(parts)}."


def _describe_goals(search: SearchResults) -> str:
    name, _ = split_sampler(search.config["sampler"])
    short_name = name.lower().removesuffix("sampler")
    words, keys = _SAMPLERS.get(short_name, (f"the sampler {escape_latex(name)}", ()))
    goals = join(
        f"{'lowest' if one.is_minimized else 'highest'} {escape_latex(objective_title(one.name))}"
        for one in search.objectives
    )
    limits = describe_limits(search)
    under = f" under the limits {escape_latex(limits)}" if limits else ""
    source = cite(*keys) if keys else ""
    seed = format_latex_number(search.config["seed"])
    return (
        f"It looks for the {goals}{under}. Configurations are suggested by {words}{source}, as in"
        f" Optuna{cite('akiba2019optuna')}, with seed {seed}."
    )


def _describe_pruning(pruning: dict[str, Any]) -> str:
    rungs = join(f"{fraction:.3g}" for fraction in pruning["rungs"])
    text = f"Trainings pause at {rungs} of their steps; by validation loss,"
    if pruning["rule"] == "halving":
        source = cite("li2020asha")
        return (
            f"{text} one in {pruning['factor']} goes on, as in asynchronous successive"
            f" halving{source}."
        )
    source = cite("golovin2017vizier")
    return f"{text} those that are no worse than the median of the others go on{source}."


def _describe_outcomes(study: Study, search: SearchResults) -> Iterator[str]:
    states = Counter(
        "repeated" if one.state == "ok" and not one.trial else one.state
        for one in search.suggestions
    )
    verbs = {state: "was" if count == 1 else "were" for state, count in states.items()}
    listed = join(
        f"{states[state]} {verbs[state]} {words}"
        for state, words in _OUTCOMES.items()
        if states[state]
    )
    mantissa, _, exponent = f"{search.spent_flops:.2e}".partition("e")
    spent = f"${mantissa}\\times 10^{{{int(exponent)}}}$ training FLOPs"
    hours = format_duration(search.spent_seconds)
    yield (
        f"Of {count_noun(len(search.suggestions), 'suggestion')}, {listed}, for {spent} in {hours}."
    )
    seeds = join(map(str, study.seeds))
    yield (
        f"Every configuration was trained once, at seed {seeds}, so nothing is tested, and the best"
        " is flattered by its selection."
    )


def _describe_importances(search: SearchResults) -> Iterator[str]:
    names = short_keys(search.keys)
    for objective, shares in search.importances.items():
        listed = join(
            f"{escape_latex(names.get(key, key))} {escape_latex(format_percent(share))}"
            for key, share in sorted(shares.items(), key=lambda one: (-one[1], one[0]))
        )
        yield (
            f"By fANOVA{cite('hutter2014fanova')} the settings explain these shares of the"
            f" variation in {escape_latex(objective_title(objective))}: {listed}."
        )
