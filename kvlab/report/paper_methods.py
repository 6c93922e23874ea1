"""The methods of a paper, in LaTeX: every number is read from the record.

A sentence cites a method where it says that the record used it, so the bibliography of
`list_citations` holds exactly the methods of the sweep.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvlab.analysis.study import GAP_ROUNDING, Study
from kvlab.report.formatting import display_unit
from kvlab.report.paper_architecture import (
    describe_attention,
    describe_cache,
    has_grouped_heads,
    has_multi_query_heads,
)
from kvlab.report.paper_text import Facts, cite, count_noun, format_latex_number, join, span
from kvlab.report.table_columns import interval_scope
from kvlab.report.table_export import escape_latex
from kvlab.spec.designs import DESIGNS
from kvlab.store.metrics import LM_EVAL_PREFIX, METRICS

MAX_DIGESTS = 3
"""Texts whose digests are named; those of more are in the record."""

MAX_LISTED_LEVELS = 8
"""Levels of a factor that are named; more are counted."""


def write_methods(study: Study, search: Iterable[str] = ()) -> str:
    """Return paragraphs about models, training, statistics and machines.

    Args:
        study: The study. Trials that have not ended are counted as missing.
        search: Sentences about the search, if the study is one: it has no design and no tests.
    """
    facts = Facts(study)
    is_design = study.search is None
    parts: dict[str, tuple[Iterable[str], ...]] = {
        "Search": (search,),
        "Models": (
            _describe_models(study, facts),
            describe_attention(facts),
            describe_cache(facts),
        ),
        "Training": (_describe_training(facts), _describe_seeds(study) if is_design else ()),
        "Evaluation": (
            _describe_evaluation(study, facts),
            _describe_intervals(study) if is_design else (),
        ),
        "Hardware and software": (_describe_machines(study),),
    }
    paragraphs = []
    for title, sources in parts.items():
        sentences = "\n".join(sentence for source in sources for sentence in source)
        if sentences:
            paragraphs.append(f"\\paragraph{{{title}.}}\n{sentences}\n")
    return "\n".join(paragraphs)


# Models


def _describe_models(study: Study, facts: Facts) -> Iterator[str]:
    shape = [
        f"{value} {words}"
        for key, words in (
            ("n_layer", "layers"),
            ("n_head", "query heads"),
        )
        if (value := facts.span("model", key))
    ]
    if width := facts.span("model", "n_embd"):
        shape.append(f"a residual stream of width {width}")
    if context := facts.span("model", "block_size"):
        shape.append(f"a context of {context} tokens")
    known = [study.parameters(levels) for levels in study.cells]
    counts = span([count for count in known if count])
    size = f" ({counts} parameters)" if counts else ""
    what = f" with {join(shape)}" if shape else ""
    models = "decoder-only transformers of the GPT-2 family" + cite("radford2019gpt2")
    yield f"We compare {models}{what}{size}."
    if study.search is None:
        yield _describe_design(study)


def _describe_design(study: Study) -> str:
    factors = (
        f"{escape_latex(factor)} ({_list_levels(levels)})"
        for factor, levels in study.factors.items()
        if len(levels) > 1
    )
    kinds = [name.partition(":") for name in str(study.sweep.get("design", "full")).split(" + ")]
    titles = " and ".join(DESIGNS[kind].title if kind in DESIGNS else kind for kind, _, _ in kinds)
    source = cite("box1961fractional") if any(kind == "fractional" for kind, _, _ in kinds) else ""
    cells = format_latex_number(len(study.cells))
    return (
        f"The ablation varies {join(factors) or 'nothing'}; the first level of each is the"
        f" baseline. The design ({escape_latex(titles)}{source}) has {cells} cells."
    )


def _list_levels(levels: Sequence[str]) -> str:
    if len(levels) <= MAX_LISTED_LEVELS:
        return ", ".join(map(escape_latex, levels))
    return f"{format_latex_number(len(levels))} levels"


# Training and evaluation

_SOURCES = {
    "docstrings": "docstrings of installed Python packages",
    "files": "the authors' own text",
    "fineweb": "FineWeb-Edu" + cite("penedo2024fineweb"),
}


def _describe_training(facts: Facts) -> Iterator[str]:
    sources = facts.values("data", "source")
    words = [_SOURCES.get(str(s).partition("-")[0], escape_latex(str(s))) for s in sources]
    text = f" of {join(dict.fromkeys(words))}" if words else ""
    tokenizers = [_name_tokenizer(str(name)) for name in facts.values("data", "tokenizer")]
    by = f" ({join(tokenizers)})" if tokenizers else ""
    tokens = facts.span("training", "tokens")
    if tokens in ("", "0"):
        yield f"The weights are as initialized; speed is measured on tokens{text}{by}."
        return
    yield f"Each is trained on {tokens} tokens{text}{by}{''.join(_describe_recipe(facts))}."
    starts = facts.values("training", "init_from")
    if starts:
        names = join(f"\\texttt{{{escape_latex(str(start))}}}" for start in starts)
        pooled = f", whose heads are mean-pooled into fewer{cite('ainslie2023gqa')}"
        fewer = facts.any(has_grouped_heads) or facts.any(has_multi_query_heads)
        yield f"Training starts from {names}{pooled if fewer else ''}."


def _name_tokenizer(name: str) -> str:
    if name == "bytes":
        return "one token a byte"
    merges = name.partition(":")[2]
    first = f"the first {format_latex_number(int(merges))} merges of " if merges else ""
    return f"{first}GPT-2's byte-pair encoding{cite('radford2019gpt2')}"


_SCHEDULES = {
    "cosine": "a cosine decay" + cite("loshchilov2017sgdr"),
    "wsd": "a stable phase and a final decay" + cite("hagele2024scaling"),
}


def _describe_recipe(facts: Facts) -> Iterator[str]:
    """Yield the optimizer and its settings, as far as they are recorded."""
    if batch := facts.span("training", "batch_tokens"):
        yield f" in batches of {batch} tokens"
    if facts.values("training", "beta1"):
        first, second = facts.span("training", "beta1"), facts.span("training", "beta2")
        decay = facts.span("training", "weight_decay")
        settings = f"$\\beta_1$ {first}, $\\beta_2$ {second}, weight decay {decay}"
        yield f" by AdamW{cite('loshchilov2019adamw')} ({settings})"
    if rate := facts.span("training", "learning_rate"):
        yield f", at a peak learning rate of {rate}"
    if warmup := facts.span("training", "warmup_tokens"):
        yield f" after a linear warm-up over {warmup} tokens"
    if schedules := [
        _SCHEDULES[s] for s in facts.values("training", "schedule") if s in _SCHEDULES
    ]:
        final = facts.span("training", "final_learning_rate")
        yield f", with {join(schedules)}{f' to {final}' if final else ''}"
    if clip := facts.span("training", "clip"):
        yield f"; gradients are clipped at norm {clip}"
    if precision := facts.values("training", "precision"):
        yield f", and the precision is {join(map(escape_latex, precision))}"
    if products := [names for names in facts.values("training", "int8") if names]:
        listed = join([escape_latex(", ".join(names)) for names in products])
        scales = "with a dynamic scale for each row and column"
        cited = cite("wortsman2023stable")
        yield f"; of linear layers these products are in int8, {scales}{cited}: {listed}"


def _describe_seeds(study: Study) -> Iterator[str]:
    trainings = len({row.training for row in study.done_rows if row.training})
    trials = len(study.done_rows)
    text = f"Each cell has {count_noun(len(study.seeds), 'seed')}"
    if trainings and not study.is_untrained:
        text += f"; the {count_noun(trials, 'trial')} rest on {count_noun(trainings, 'training')}"
        if trainings < trials:
            text += ", since cells that differ only in serving share weights"
        text += ". At one seed all cells see the same batches in the same order"
    yield f"{text}."
    others = {state: n for state, n in study.status_counts.items() if state != "done"}
    if others:
        listed = ", ".join(f"{n} {escape_latex(state)}" for state, n in sorted(others.items()))
        rest = format_latex_number(sum(others.values()))
        yield f"Of {count_noun(len(study.rows), 'trial')} {rest} are not measured ({listed})."
    tuning = study.sweep.get("tuning")
    if tuning:
        tuned = ", ".join(map(str, tuning["seeds"]))
        yield (
            f"The learning rate of each architecture was tuned at other seeds ({tuned}): it is the"
            " vertex of a parabola in the logarithm of the rate."
        )


@dataclass(frozen=True)
class _Probe:
    """What a metric of a prefix is called in a paper."""

    prefix: str
    words: str
    keys: tuple[str, ...]


_PROBES = (
    _Probe("hellaswag_acc", "HellaSwag", ("zellers2019hellaswag",)),
    _Probe("recall_", "multi-query associative recall", ("arora2023zoology",)),
    _Probe("needle_", "a needle probe", ("hsieh2024ruler",)),
    _Probe(LM_EVAL_PREFIX, "tasks of the LM Evaluation Harness", ("gao2024harness",)),
)


def _describe_evaluation(study: Study, facts: Facts) -> Iterator[str]:
    metric = METRICS[study.primary_metric]
    measured = study.measured_metrics
    if not study.is_untrained:
        tokens = facts.span("evaluation", "loss_tokens")
        over = f" over {tokens} held-out tokens" if tokens and "loss" in measured else ""
        unit = display_unit(study.primary_metric)
        in_unit = f", in {escape_latex(unit)}" if unit else ""
        yield f"Quality is the {escape_latex(metric.title)}{over}{in_unit}."
    if "serving_gap" in measured:
        yield (
            "Every model is scored twice on the same text, in one forward pass and token by token"
            " through the cache that serves; the serving gap is the second loss minus the first."
        )
    probes = [
        one.words + cite(*one.keys)
        for one in _PROBES
        if any(name.startswith(one.prefix) for name in measured)
    ]
    if probes:
        yield f"We also score {join(probes)}."
    if facts.span("model", "block_size"):
        yield "KV size is the exact number of bytes that the cache of one full sequence holds."


# Statistics


def _describe_intervals(study: Study) -> Iterator[str]:
    """Yield how differences are tested, as far as this sweep tests any."""
    metric, percent = study.primary_metric, f"{100 * (1 - study.decide.alpha):g}\\%"
    if study.is_untrained:
        return
    if len(study.seeds) < 2:
        yield "With one seed the spread between seeds is unknown, so no difference is tested."
        return
    yield f"Differences are paired by seed; their intervals are simultaneous {percent} intervals."
    scope = interval_scope(study)
    tested = [effect for effect in study.effects(metric) if effect.is_tested]
    if scope != "levels" and any(found.has_interval for found in study.comparisons.values()):
        yield (
            "Those of cells against their references hold for all cells together, by the same"
            " procedure as those of levels."
        )
    if tested and study.declared_looks is not None:
        yield from _describe_looks(study)
    elif tested:
        pooled = any(effect.error for effect in tested)
        error = (
            "the larger of a level's own standard error and one pooled over levels, whose degrees"
            f" of freedom are Satterthwaite's{cite('satterthwaite1946variance')}"
        )
        yield (
            "Those of levels hold for all levels together: they are compatible with Holm's"
            f" procedure{cite('holm1979procedure', 'strassburger2008holm')}"
            f"{f', and use {error}' if pooled else ''}."
        )
    if study.decide.margin is not None and tested:
        margin = format_latex_number(study.decide.margin)
        yield (
            f"A level costs less than the margin of {margin} if the worse end of its interval"
            f" does{cite('schuirmann1987equivalence')}."
        )
    yield from _describe_gap_test(study)


def _describe_looks(study: Study) -> Iterator[str]:
    assert study.declared_looks is not None, "only of sweeps with looks"
    looks = join(map(str, study.declared_looks.looks))
    yield (
        f"Those of levels are repeated confidence intervals{cite('jennison1989repeated')}: looks"
        f" after {looks} seeds were declared before the first trial, and share the"
        f" error{cite('lan1983boundaries')} in the form of O'Brien and"
        f" Fleming{cite('obrien1979multiple')}, with Holm's procedure over the"
        f" levels{cite('holm1979procedure')}."
    )


def _describe_gap_test(study: Study) -> Iterator[str]:
    gaps = [gap for gap in study.serving_gaps.values() if abs(gap.value) >= GAP_ROUNDING]
    if any(gap.interval is not None for gap in gaps):
        yield "Serving gaps have intervals over trainings, which hold for all cells together."


# Machines


def _describe_machines(study: Study) -> Iterator[str]:
    recorded = [row.record.get("provenance") or {} for row in study.done_rows]

    def values(key: str, part: str | None = None) -> list[str]:
        found = ((one.get(part) or {}) if part else one for one in recorded)
        return sorted({str(one[key]) for one in found if one.get(key) is not None})

    devices, threads = values("device"), values("threads")
    if devices:
        cores = (
            f" ({', '.join(threads)} thread{'s' if threads != ['1'] else ''})" if threads else ""
        )
        yield f"Trials ran on {join(map(escape_latex, devices))}{cores}."
    if weights := values("weights"):
        yield f"Weights were evaluated and benchmarked in {join(map(escape_latex, weights))}."
    software = []
    if versions := values("kvlab"):
        commits = [commit[:12] for commit in values("commit")]
        at = f" (commit {', '.join(map(escape_latex, commits))})" if commits else ""
        software.append(f"kvlab {', '.join(map(escape_latex, versions))}{at}")
    if versions := values("torch", "versions"):
        software.append(f"PyTorch {join(map(escape_latex, versions))}{cite('paszke2019pytorch')}")
    if versions := values("python"):
        software.append(f"Python {join(map(escape_latex, versions))}")
    if software:
        yield f"Software: {join(software)}."
    digests = values("digest", "data")
    if 0 < len(digests) <= MAX_DIGESTS:
        listed = ", ".join(f"\\texttt{{{escape_latex(one[:12])}}}" for one in digests)
        yield f"The tokens have the sha256 {listed}."
