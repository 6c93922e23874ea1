"""The architectures and caches of a sweep, as sentences of a paper in LaTeX."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvlab.report.paper_text import Facts, cite, join, span
from kvlab.report.table_export import escape_latex
from kvlab.spec.dtypes import DTYPES


def has_grouped_heads(model: Mapping[str, Any]) -> bool:
    return bool(1 < model.get("n_kv_head", 1) < model.get("n_head", 1))


def has_multi_query_heads(model: Mapping[str, Any]) -> bool:
    return bool(model.get("n_kv_head") == 1 < model.get("n_head", 1))


def _is_multi_head(model: Mapping[str, Any]) -> bool:
    is_latent = _count_latents(model) > 0
    return bool("n_head" in model and model.get("n_kv_head") == model["n_head"] and not is_latent)


def _count_latents(model: Mapping[str, Any]) -> int:
    kv = model.get("kv")
    return int(kv.get("groups", 1)) if isinstance(kv, Mapping) else 0


_MODEL_METHODS: tuple[tuple[Callable[[Mapping[str, Any]], bool], str, tuple[str, ...]], ...] = (
    (_is_multi_head, "multi-head attention", ("vaswani2017attention",)),
    (has_grouped_heads, "grouped-query attention", ("ainslie2023gqa",)),
    (has_multi_query_heads, "multi-query attention", ("shazeer2019mqa",)),
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
    (lambda m: bool(m.get("rope_scaling")), "scaled rotary frequencies", ("peng2024yarn",)),
    (lambda m: bool(m.get("qk_norm")), "normalized queries and keys", ("dehghani2023vit22b",)),
    (lambda m: m.get("norm_placement") == "sandwich", "norms on both sides of each block", ()),
    (lambda m: m.get("mlp") == "geglu", "GEGLU feed-forward layers", ("shazeer2020glu",)),
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


def describe_attention(facts: Facts) -> Iterator[str]:
    """Yield sentences about attention, positions, windows and what layers share."""
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
            yield f"{escape_latex(name)} layers \\texttt{{{escape_latex(settings)}}}"


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


def describe_cache(facts: Facts) -> Iterator[str]:
    """Yield sentences about how the cache is stored and what it evicts."""
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
    trained = [n for n in facts.values("training", "kv_dtype") if n not in (None, "model")]
    if trained:
        yield (
            "In some cells the forward pass of training reads keys and values as a cache in"
            f" {join(map(escape_latex, trained))} gives them back, and gradients pass straight"
            f" through{cite('bengio2013estimating', 'jacob2018quantization')}."
        )
    ways = {
        "recency": f"the first tokens and the newest{cite('xiao2024streaming')}",
        "heavy_hitters": "the newest tokens and, for each head, those that received the most"
        f" attention{cite('zhang2023h2o')}",
        "snapkv": "those of the prompt to which its last tokens attend most, and all that follow"
        f" it{cite('li2024snapkv')}",
    }
    evictions = {evict["by"] for evict in facts.values("serving", "evict")}
    if kept := [words for by, words in ways.items() if by in evictions]:
        yield (
            "In some cells the global layers keep some of the tokens at serving:"
            f" {join(kept)}. Keys keep the rotation of their own position."
        )
