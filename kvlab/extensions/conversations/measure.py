"""Reuse between the turns of conversations: hit rates by budget, first tokens, the reuse gap.

The cache's bookkeeping needs no model. For whole loads and every budget it runs over a cache of
tensors without storage, where a pass only advances the length: the same code takes the same
decisions. The model itself serves the first conversations, and what its cache then found and held
must equal that bookkeeping.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlab.benchmark.interleaving import InterleavedTimings
from kvlab.benchmark.measurement import Measurement, Metrics, TableLayout
from kvlab.benchmark.measures.generation_task import read_book
from kvlab.benchmark.session import Session, Variant
from kvlab.benchmark.timing_statistics import TimingSamples
from kvlab.cache import KVCache
from kvlab.errors import MeasurementError
from kvlab.extensions.conversations.config import (
    MAX_REUSE_TURNS,
    ConversationsConfig,
    ReuseFields,
)
from kvlab.extensions.conversations.load import Load, Request, find_exact_hits, make_load
from kvlab.extensions.conversations.prefix_cache import PrefixCache
from kvlab.extensions.conversations.turns import Turn, run_tokens
from kvlab.model.attention_backends import record_kernels
from kvlab.spec.benchmark_config import BenchmarkConfig
from kvlab.spec.flops import forward_flops

TABLES = (
    TableLayout("reuse between turns", {}, {
        "requests": "requests", "hit_rate": "hit rate", "hit_rate_exact": "any earlier turn",
        "flops_saved": "FLOPs saved", "warm_ttft": "first token, warm", "cold_ttft": "cold",
        "reuse_gap": "reuse gap", "reuse_kl": "KL", "reuse_top_changed": "top changed",
        "conversation_bytes": "a conversation", "conversations": "fit",
        "bytes_held": "held at most", "evictions": "evictions",
    }, ("hit_rate", "hit_rate_exact", "flops_saved", "reuse_top_changed")),
    TableLayout("reuse by turn", {"turn": "turn"}, {
        "turn_hit_rate": "hit rate", "turn_hit_rate_exact": "any earlier turn",
        "turn_warm_ttft": "first token, warm", "turn_cold_ttft": "cold",
    }, ("turn_hit_rate", "turn_hit_rate_exact")),
    TableLayout("reuse by budget", {"budget_bytes": "bytes"}, {
        "budget_conversations": "fit", "budget_hit_rate": "hit rate",
        "budget_evictions": "evictions",
    }, ("budget_hit_rate",)),
)  # fmt: skip

UNLIMITED = 2**62
"""Bytes of a budget that nothing reaches."""

CURVE_DOUBLINGS = 6
"""Budgets of a curve of its own, below the bytes that the whole load fills."""


def measure(session: Session) -> Iterator[Measurement]:
    """Yield what every variant's prefix cache reuses of the load.

    Raises:
        DataError: the text is too short for the load.
        MeasurementError: the cache found or held something else than its bookkeeping.
    """
    config = session.settings.options.get("conversations")
    if not isinstance(config, ConversationsConfig):
        notice = "conversations is left out: it needs a load"
        session.on_notice(f"{notice}, such as --load turns=5 prompt_tokens=64 reply_tokens=32")
        return
    for variant in session.variants:
        model = variant.model.config
        text = _read_text(session, variant)
        if not len(text):  # hits and times do not depend on it
            rng = np.random.default_rng(config.seed)
            text = rng.integers(0, model.vocab_size, 2**20).tolist()
        load = make_load(config, text, model.block_size)
        yield from _measure_variant(session, variant, config, load)


def _read_text(session: Session, variant: Variant) -> Sequence[int] | NDArray[Any]:
    """Return the tokens that the load is made of; none if there is no text."""
    settings = session.settings
    if len(settings.held_out) or settings.text is None or variant.tokenizer is None:
        return settings.held_out
    return read_book(settings.text, variant.tokenizer)


def _measure_variant(
    session: Session, variant: Variant, config: ConversationsConfig, load: Load
) -> Iterator[Measurement]:
    make = partial(session.make_line, "conversations", variant=variant, exact=True)
    exact_hits = find_exact_hits(load)
    whole = keep_books(variant, load, None, config.snapshot_tokens)
    books = whole
    if config.budget is not None:
        books = keep_books(variant, load, config.budget, config.snapshot_tokens)
    each = conversation_bytes(variant, load, config.snapshot_tokens)
    fitting = None if config.budget is None else int(config.budget / each)
    of_budget: dict[str, Any] = {"budget_bytes": config.budget}
    for metric, value, unit, fields in (
        ("requests", len(load.requests), "requests", {}),
        ("hit_rate", books.hit_rate, "", of_budget),
        ("hit_rate_exact", sum(exact_hits) / load.prompt_tokens, "", of_budget),
        ("flops_saved", flops_saved(variant, load, books.hits), "", of_budget),
        ("conversation_bytes", each, "bytes", {}),
        ("conversations", fitting, "conversations", {}),
        ("bytes_held", max(books.bytes_held), "bytes", {}),
        ("evictions", books.evictions, "evictions", {}),
    ):
        if value is not None:
            yield make(metric=metric, value=value, unit=unit, **fields)
    for metric, hits in (("turn_hit_rate", books.hits), ("turn_hit_rate_exact", exact_hits)):
        found, total = Counter[int](), Counter[int]()
        for request, hit in zip(load.requests, hits, strict=True):
            found[request.turn] += hit
            total[request.turn] += len(request.prompt)
        for turn in sorted(total):
            yield make(metric=metric, value=found[turn] / total[turn], unit="", turn=turn)
    # the curve over budgets, those of the spec or a doubling up to all of the load
    budgets = {*config.budgets, *([config.budget] if config.budget else [])}
    if not config.budgets:
        budgets |= {max(1, max(whole.bytes_held) >> n) for n in range(CURVE_DOUBLINGS + 1)}
    for budget in sorted(budgets):
        books = keep_books(variant, load, budget, config.snapshot_tokens)
        session.on_turn("conversations")
        for metric, value, unit in (
            ("budget_conversations", int(budget / each), "conversations"),
            ("budget_hit_rate", books.hit_rate, ""),
            ("budget_evictions", books.evictions, "evictions"),
        ):
            yield make(metric=metric, value=value, unit=unit, budget_bytes=budget)
    yield from _served_lines(session, variant, config, load.select_first(config.measured))


def metrics(lines: Sequence[Measurement], _config: BenchmarkConfig) -> Metrics:
    """Return what a trial records of its lines."""
    found: Metrics = {}
    for line in lines:
        if line.value is None:
            continue
        if line.metric in _RECORDED:
            name, is_time = f"reuse_{line.metric.removeprefix('reuse_')}", line.unit == "s"
            found[f"{name}_ms" if is_time else name] = line.value * (1000 if is_time else 1)
        elif line.metric == "turn_hit_rate":
            turn = ReuseFields.of(line).turn
            if turn is not None and turn <= MAX_REUSE_TURNS:
                found[f"reuse_hit_rate_turn{turn}"] = line.value
    return found


_RECORDED = frozenset({
    "hit_rate", "hit_rate_exact", "flops_saved", "warm_ttft", "cold_ttft", "reuse_gap", "reuse_kl",
    "reuse_top_changed", "conversation_bytes", "conversations", "bytes_held", "evictions",
    "requests",
})  # fmt: skip


# Bookkeeping


@dataclass(frozen=True)
class Books:
    """What a prefix cache did over a load.

    Attributes:
        hits: tokens restored of each request's prompt.
        hit_rate: the sum of these over all tokens of prompts.
        bytes_held: after each request.
    """

    hits: list[int]
    hit_rate: float
    bytes_held: list[int]
    evictions: int


def serve_turn(
    prefixes: PrefixCache, cache: KVCache, request: Request, run: Callable[[list[int]], Any]
) -> int:
    """Serve one turn and store it: restore, prefill the rest, decode the reply.

    Returns:
        The tokens that were restored.
    """
    cache.reset()
    turn = Turn(request.prompt, cache, prefixes, run, weights=_WEIGHTS)
    turn.prefill()
    for token in request.reply:
        run([token])
    turn.tokens += request.reply
    turn.finish()
    return turn.hit


_WEIGHTS = "the variant's"
"""One prefix cache serves one variant here."""


def keep_books(variant: Variant, load: Load, budget: int | None, snapshot_every: int) -> Books:
    """Return what a prefix cache of ``budget`` bytes finds and holds, without a model.

    Args:
        budget: None for no limit.
    """
    cache = _new_cache(variant, torch.device("meta"))
    prefixes = PrefixCache(budget or UNLIMITED, snapshot_every=snapshot_every)
    hits, held = [], []
    for request in load.requests:
        hits.append(serve_turn(prefixes, cache, request, lambda part: cache.advance(len(part))))
        held.append(prefixes.bytes_held)
    return Books(hits, sum(hits) / load.prompt_tokens, held, prefixes.evictions)


def conversation_bytes(variant: Variant, load: Load, snapshot_every: int) -> float:
    """Return the mean bytes of a conversation at its end; what all share counts once."""
    cache = _new_cache(variant, torch.device("meta"))
    prefixes = PrefixCache(UNLIMITED, snapshot_every=snapshot_every)
    contexts = load.last_contexts()
    for context in contexts:
        cache.reset()
        cache.advance(len(context))
        prefixes.insert(context, cache, weights=_WEIGHTS)
    return prefixes.bytes_held / len(contexts)


def _new_cache(variant: Variant, device: torch.device) -> KVCache:
    model = variant.model
    return KVCache(variant.layout, 1, model.config.block_size, model.dtype, device)


def flops_saved(variant: Variant, load: Load, hits: Iterable[int]) -> float:
    """Return the share of the prompts' FLOPs that restored tokens would have taken.

    Every token of a prompt counts alike, by the convention of `kvlab.spec.flops`.
    """
    saved = total = 0
    for request, hit in zip(load.requests, hits, strict=True):
        flops = forward_flops(variant.model.config, len(request.prompt))
        total += flops
        saved += flops * hit // len(request.prompt)
    return saved / total


# The model serves


@dataclass(frozen=True)
class ServedTurn:
    """One turn that the model served warm and cold.

    Attributes:
        seconds: until the first token, warm and cold in each round; empty without a hit.
        changes: sums over the reply's tokens: warm minus cold loss, KL(cold || warm), and
            how many have another likeliest token.
        kernels: the attention kernels of passes that are not timed, over the same tokens.
    """

    request: Request
    hit: int
    seconds: list[tuple[float, float]]
    changes: tuple[float, float, int]
    kernels: set[str]


def _served_lines(
    session: Session, variant: Variant, config: ConversationsConfig, load: Load
) -> Iterator[Measurement]:
    """Yield times and changes of the conversations of ``load``, whose cache has no limit."""
    watch = session.watch_noise()
    turns = list(serve_both_ways(session, variant, config, load))
    timed = [turn for turn in turns if turn.seconds]
    if timed:
        samples = {
            (variant.name, series): TimingSamples(
                np.array([one.seconds for one in timed])[..., way].T
            )
            for way, series in enumerate(("warm_ttft", "cold_ttft"))
        }
        kernels = "; ".join(sorted(set.union(*(turn.kernels for turn in timed))))
        timings = InterleavedTimings(samples, watch.read_noise(), {variant.name: kernels})
        session.timings.append(timings)
        numbers = np.array([turn.request.turn for turn in timed])
        prompts = np.array([len(turn.request.prompt) for turn in timed])
        # the mean of all prompts with a hit, and by turn
        for series, number in itertools.product(
            ("warm_ttft", "cold_ttft"), (None, *np.unique(numbers))
        ):
            chosen = np.full(len(timed), True) if number is None else numbers == number
            rounds = samples[variant.name, series].rounds[:, chosen]
            means = TimingSamples(rounds.mean(axis=1, keepdims=True))
            metric = series if number is None else f"turn_{series}"
            yield session.make_line(
                "conversations", metric, variant, means.median, "s", batch_size=1, cached=True,
                turn=None if number is None else int(number),
                prompt_tokens=round(prompts[chosen].mean()),
                **session.reliability(timings, means, variant),
            )  # fmt: skip
    if not len(_read_text(session, variant)):
        return  # losses of random tokens say nothing
    tokens = sum(len(turn.request.reply) for turn in turns)
    sums = [sum(values) / tokens for values in zip(*(turn.changes for turn in turns), strict=True)]
    names = (("reuse_gap", "nats/token"), ("reuse_kl", "nats/token"), ("reuse_top_changed", ""))
    for (metric, unit), value in zip(names, sums, strict=True):
        yield session.make_line("conversations", metric, variant, value, unit, cached=True)


@torch.inference_mode()
def serve_both_ways(
    session: Session, variant: Variant, config: ConversationsConfig, load: Load
) -> Iterator[ServedTurn]:
    """Serve every turn warm and cold, and compare with the bookkeeping.

    Raises:
        MeasurementError: hits or bytes differ from it.
    """
    model = variant.model
    expected = keep_books(variant, load, None, config.snapshot_tokens)
    warm, cold = (_new_cache(variant, model.device) for _ in range(2))
    prefixes = PrefixCache(UNLIMITED, snapshot_every=config.snapshot_tokens)

    def run(cache: KVCache, tokens: list[int], kept: list[Tensor] | None = None) -> Tensor:
        """Run tokens in one pass; return the logits (1, V) after the last, and append them."""
        logits = run_tokens(model, cache, tokens)
        if kept is not None:
            kept.append(logits)
        return logits

    def start_warm(prompt: list[int]) -> Tensor:
        warm.reset()
        turn = Turn(prompt, warm, prefixes, partial(run, warm), weights=_WEIGHTS)
        logits: Tensor = turn.prefill(stores=False)
        return logits

    def start_cold(prompt: list[int]) -> Tensor:
        cold.reset()
        return run(cold, prompt)

    run(cold, load.requests[0].prompt)  # warms up
    for number, request in enumerate(load.requests):
        ways = (partial(start_warm, request.prompt), partial(start_cold, request.prompt))
        rounds = session.settings.stop_rule.min_rounds if expected.hits[number] else 0
        if rounds and model.device.type == "cuda":
            _time_in_turn(ways, 0)  # plans the kernels of the first pass of a length
        seconds = [_time_in_turn(ways, n) for n in range(rounds)]
        warm_logits: list[Tensor] = []
        with record_kernels() as kernels:
            hit = serve_turn(prefixes, warm, request, partial(run, warm, kept=warm_logits))
            cold_logits = [start_cold(request.prompt)]
            cold_logits += [run(cold, [token]) for token in request.reply[:-1]]
        found = hit, prefixes.bytes_held
        if found != (expected.hits[number], expected.bytes_held[number]):
            raise MeasurementError(
                f"turn {request.turn} of conversation {request.conversation}: the prefix cache"
                f" found {found[0]} tokens and holds {found[1]:,} bytes, by its bookkeeping"
                f" {expected.hits[number]} and {expected.bytes_held[number]:,}"
            )
        before_reply = torch.cat(warm_logits[-len(request.reply) - 1 : -1])
        changes = _compare(before_reply, torch.cat(cold_logits), request.reply)
        session.on_turn("conversations")
        yield ServedTurn(request, hit, seconds, changes, kernels)


def _time_in_turn(ways: Sequence[Callable[[], Tensor]], number: int) -> tuple[float, float]:
    """Return the seconds of both ways, the second one first in every other round."""
    seconds = [0.0, 0.0]
    for way in (0, 1) if number % 2 == 0 else (1, 0):
        start = perf_counter()
        ways[way]().argmax(-1).tolist()  # reads the token back: it waits
        seconds[way] = perf_counter() - start
    return seconds[0], seconds[1]


def _compare(warm: Tensor, cold: Tensor, reply: list[int]) -> tuple[float, float, int]:
    """Return `ServedTurn.changes` of logits (R, V)."""
    warm_logs, cold_logs = (x.double().log_softmax(-1) for x in (warm, cold))
    at = torch.arange(len(reply)), torch.tensor(reply)
    gap = cold_logs[at] - warm_logs[at]
    kl = (cold_logs.exp() * (cold_logs - warm_logs)).sum(-1)
    highest = warm.gather(-1, cold.argmax(-1, keepdim=True))[:, 0]
    changed = highest < warm.amax(-1)  # of equal logits either may be the likeliest
    return float(gap.sum()), float(kl.sum()), int(changed.sum())
