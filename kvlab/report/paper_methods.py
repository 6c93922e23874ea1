"""The methods of a paper, in LaTeX: every number is read from the record.

A sentence cites a method where it says that the record used it, so the bibliography of
`list_citations` holds exactly the methods of the sweep.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from kvlab.analysis.serving_gaps import fewest_trainings
from kvlab.analysis.study import GAP_ROUNDING, Study
from kvlab.report.formatting import display_unit
from kvlab.report.table_columns import interval_scope
from kvlab.report.table_export import escape_latex
from kvlab.spec.designs import DESIGNS
from kvlab.spec.dtypes import DTYPES
from kvlab.store.metrics import LM_EVAL_PREFIX, METRICS

Experiment = Mapping[str, Mapping[str, Any]]

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
        "Models": (_describe_models(study, facts), _describe_methods(facts)),
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


def list_citations(text: str) -> list[str]:
    """Return the keys that LaTeX cites, sorted."""
    cited = re.findall(r"\\cite\{([^}]*)\}", text)
    return sorted({key for keys in cited for key in keys.split(",")})


def write_bibliography(keys: Iterable[str]) -> str:
    """Return the BibTeX entries of ``keys``."""
    entries = _read_entries()
    return "\n".join(entries[key] for key in keys)


@cache
def _read_entries() -> dict[str, str]:
    """Return the entries of the package's bibliography by key."""
    text = (files("kvlab.report") / "references.bib").read_text("utf-8")
    entries = re.findall(r"^@\w+\{([^,]+),.*?^\}\n", text, re.MULTILINE | re.DOTALL)
    bodies = re.findall(r"^@\w+\{[^,]+,.*?^\}\n", text, re.MULTILINE | re.DOTALL)
    return dict(zip(entries, bodies, strict=True))


def cite(*keys: str) -> str:
    return f"~\\cite{{{','.join(keys)}}}"


class Facts:
    """The experiments of the trials that are done.

    Args:
        study: The study.

    Attributes:
        experiments: One experiment a trial.
    """

    def __init__(self, study: Study):
        self.experiments: list[Experiment] = [row.record["experiment"] for row in study.done_rows]

    def values(self, section: str, key: str) -> list[Any]:
        """Return the distinct values of a key that is not null, in the order of the cells."""
        found = [one.get(section, {}).get(key) for one in self.experiments]
        kept: list[Any] = []
        for value in found:
            if value is not None and value not in kept:
                kept.append(value)
        return kept

    def any(self, test: Callable[[Mapping[str, Any]], bool]) -> bool:
        """Return whether the model of any experiment passes a test."""
        return any(test(one.get("model", {})) for one in self.experiments)

    def span(self, section: str, key: str) -> str:
        """Return the values of a number as LaTeX: one, or the least and the greatest."""
        return span(self.values(section, key))


def span(values: Sequence[Any]) -> str:
    """Return numbers as LaTeX: one, or the least and the greatest; empty without any."""
    numbers = sorted({value for value in values if isinstance(value, int | float)})
    if not numbers:
        return ""
    low, high = format_latex_number(numbers[0]), format_latex_number(numbers[-1])
    return low if len(numbers) == 1 else f"{low} to {high}"


def format_latex_number(value: float) -> str:
    """Format a count with separated thousands, a small number with a power of ten."""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}".replace(",", "{,}").replace("-", "$-$")
    mantissa, _, exponent = f"{value:.4e}".partition("e")
    if -3 <= int(exponent) < 4:
        return f"{value:.5g}".replace("-", "$-$")
    mantissa = mantissa.rstrip("0").rstrip(".").replace("-", "$-$")
    return f"${mantissa}\\times 10^{{{int(exponent)}}}$".replace("$$", "")


def count_noun(number: int, noun: str) -> str:
    """Return a count with its noun, as LaTeX."""
    return f"{format_latex_number(number)} {noun}{'s' if number != 1 else ''}"


def join(parts: Iterable[str]) -> str:
    """Join words as a list: ``a``, ``a and b``, ``a, b and c``; empty without any."""
    *first, last = list(parts) or [""]
    return f"{', '.join(first)} and {last}" if first else last


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


def _is_grouped(model: Mapping[str, Any]) -> bool:
    return bool(1 < model.get("n_kv_head", 1) < model.get("n_head", 1))


def _is_multi_query(model: Mapping[str, Any]) -> bool:
    return bool(model.get("n_kv_head") == 1 < model.get("n_head", 1))


def _is_multi_head(model: Mapping[str, Any]) -> bool:
    is_latent = _count_latents(model) > 0
    return bool("n_head" in model and model.get("n_kv_head") == model["n_head"] and not is_latent)


def _count_latents(model: Mapping[str, Any]) -> int:
    kv = model.get("kv")
    return int(kv.get("groups", 1)) if isinstance(kv, Mapping) else 0


_MODEL_METHODS: tuple[tuple[Callable[[Mapping[str, Any]], bool], str, tuple[str, ...]], ...] = (
    (_is_multi_head, "multi-head attention", ("vaswani2017attention",)),
    (_is_grouped, "grouped-query attention", ("ainslie2023gqa",)),
    (_is_multi_query, "multi-query attention", ("shazeer2019mqa",)),
    (lambda m: m.get("kv") == "tied", "keys and values that are one stored tensor", ()),
    (lambda m: m.get("kv") == "grouped_tied", "grouped-tied attention", ("zadouri2025gta",)),
    (lambda m: _count_latents(m) == 1, "multi-head latent attention", ("deepseek2024v2",)),
    (lambda m: _count_latents(m) > 1, "grouped latent attention", ("zadouri2025gta",)),
    (lambda m: m.get("position") == "learned", "learned position embeddings", ()),
    (lambda m: m.get("position") == "rope", "rotary position embeddings", ("su2024roformer",)),
    (lambda m: m.get("position") == "none", "no position embeddings", ()),
    (lambda m: m.get("sink") == "learned", "a learned sink logit in each head", ("openai2025oss",)),
    (
        lambda m: bool(m.get("sink_tokens")),
        "first tokens that stay visible beside the windows",
        ("xiao2024streaming",),
    ),
    (lambda m: m.get("norm") == "rmsnorm", "RMSNorm", ("zhang2019rmsnorm",)),
    (lambda m: m.get("mlp") == "swiglu", "SwiGLU feed-forward layers", ("shazeer2020glu",)),
)

_SHARING: dict[str, tuple[str, tuple[str, ...]]] = {
    "adjacent": ("adjacent layers in groups of {number}", ("brandon2024cla",)),
    "character-ai": ("the layers of Character.AI's grouping", ("characterai2024inference",)),
    "trailing": ("the last {number} layers with the last owner below them", ("sun2024yoco",)),
    "sandwich": ("all layers but the first and the last", ("wu2024systematic",)),
}
"""Name of a pattern -> its words, with ``{number}`` for its argument, and what to cite."""


def _describe_methods(facts: Facts) -> Iterator[str]:
    used = [words + (cite(*keys) if keys else "") for test, words, keys in _MODEL_METHODS
            if facts.any(test)]  # fmt: skip
    used += [*_describe_windows(facts)]
    if used:
        yield f"The cells use {join(used)}."
    if kinds := [*_describe_kinds(facts)]:
        yield f"Layers of one kind have settings of their own in some cells: {join(kinds)}."
    if shared := [*_describe_sharing(facts.values("model", "kv_sharing"))]:
        yield (
            "In some cells layers share their keys and values, in training and in serving:"
            f" {join(shared)}."
        )
    if tied := [*_describe_sharing(facts.values("serving", "tie"))]:
        rules = join(map(escape_latex, facts.values("serving", "tie_rule")))
        rule = f" (rule: {rules})" if rules else ""
        yield (
            "In some cells layers are tied at serving alone, so they share one cache slot though"
            f" each was trained with keys and values of its own{rule}: {join(tied)}."
        )
    dtypes = [name for name in facts.values("serving", "kv_dtype") if name != "model"]
    if dtypes:
        known = {name: DTYPES[name] for name in dtypes if name in DTYPES}
        blocks = [name for name, dtype in known.items() if dtype.default_residual is not None]
        scaled = [d for name, d in known.items() if d.is_quantized and name not in blocks]
        groups = [n for n in facts.values("serving", "kv_group") if n and scaled]
        groups += [dtype.default_group for dtype in scaled if dtype.default_group]
        source = cite("liu2024kivi") if scaled else ""
        sizes = join(map(str, sorted({*groups})))
        each = f", or for each group of {sizes} numbers" if groups else ""
        scales = f" with one scale a token and head{each}{source}" if scaled else ""
        yield f"The cache is also stored in {join(map(escape_latex, dtypes))}{scales}."
        if blocks:
            yield (
                f"In {join(map(escape_latex, blocks))} keys have a scale and a minimum for each"
                " channel and block of tokens, and values for each token and group of channels;"
                f" the newest tokens stay in the model's precision{cite('liu2024kivi')}."
            )
    ways = {
        "recency": f"the first tokens and the newest{cite('xiao2024streaming')}",
        "heavy_hitters": "the newest tokens and, for each head, those that received the most"
        f" attention{cite('zhang2023h2o')}",
    }
    evictions = {evict["by"] for evict in facts.values("serving", "evict")}
    if kept := [words for by, words in ways.items() if by in evictions]:
        yield (
            "In some cells the global layers keep a fixed number of tokens at serving:"
            f" {join(kept)}. Keys keep the rotation of their own position."
        )


def _describe_windows(facts: Facts) -> Iterator[str]:
    """Yield the window and patterns of local attention, if a model has any."""
    patterns = [p for p in facts.values("model", "attention_pattern") if "L" in str(p)]
    if not patterns:
        return
    windows = span(
        [*facts.values("model", "window")]
        + [kind.get("window") for kind in facts.values("model", "local")]
    )
    text = f"local layers that see {windows} tokens{cite('beltagy2020longformer')}"
    mixed = any("G" in str(pattern) for pattern in patterns)
    source = cite("characterai2024inference") if mixed else ""
    between = " between global ones" if mixed else ""
    tiled = join(map(escape_latex, patterns))
    yield f"{text}{between} (pattern {tiled}, tiled over depth){source}"


def _describe_kinds(facts: Facts) -> Iterator[str]:
    """Yield the settings that layers of one kind have, as a file writes them."""
    named = [(key, own) for key in ("local", "global") for own in facts.values("model", key)]
    for kinds in facts.values("model", "kinds"):
        named += [(f"kind {letter}", own) for letter, own in kinds.items()]
    for name, own in named:
        settings = ", ".join(f"{key}: {value}" for key, value in own.items() if value is not None)
        if settings:
            yield f"{escape_latex(name)} layers \texttt{{{escape_latex(settings)}}}"


def _describe_sharing(patterns: Sequence[Any]) -> Iterator[str]:
    """Yield each pattern of sharing in words."""
    for pattern in patterns:
        if not isinstance(pattern, str):
            yield f"the groups \\texttt{{{escape_latex(str(pattern))}}}{cite('brandon2024cla')}"
            continue
        kind, _, number = pattern.partition(":")
        if kind in _SHARING:
            words, keys = _SHARING[kind]
            yield words.format(number=escape_latex(number)) + cite(*keys)


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
        fewer = facts.any(_is_grouped) or facts.any(_is_multi_query)
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
    if scope != "levels" and any(one.kind == "tested" for one in study.cell_differences.values()):
        yield (
            "Those of cells against the baseline hold for all cells together, as comparisons with a"
            f" control do{cite('dunnett1955control')}: they use the studentized maximum"
            f" modulus{cite('hochberg1974tmethod')}, the larger of a cell's own standard error and"
            " one pooled over cells, and the degrees of freedom of Greenhouse and"
            f" Geisser{cite('greenhouse1959profile')}."
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
    if gaps and max(gap.trainings for gap in gaps) >= fewest_trainings(study.decide.alpha):
        yield (
            "Serving gaps are tested by flipping their signs, training by"
            f" training{cite('fisher1935design')}, in all cells at"
            f" once{cite('westfall1993resampling')}."
        )


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
