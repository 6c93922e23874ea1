"""The RTX 4090 article's task: read 256 tokens of Moby Dick, sample 256 more, in tasks/s."""

import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from kvlab.benchmark.decode_timing import time_preparation, time_uncached
from kvlab.benchmark.interleaving import Work
from kvlab.benchmark.measurement import Measurement, TableLayout
from kvlab.benchmark.session import Session, Variant
from kvlab.cache import KVCache
from kvlab.data.tokenizers import load_tokenizer
from kvlab.errors import DataError
from kvlab.model import GPT
from kvlab.model.generate import Decoder, Sampling, generate, prefill
from kvlab.spec.benchmark_config import TASK_PROMPT_TOKENS, TASK_TOKENS

TABLES = (
    TableLayout("256 tokens of Moby Dick + 256 sampled", {
        "batch_size": "batch", "cached": "cache",
    }, {
        "tasks_per_second": "tasks/s", "task_ratio": "time of the first's",
        "step_preparation": "to prepare a step",
    }),
)  # fmt: skip

PROMPT_TOKENS, NEW_TOKENS = TASK_PROMPT_TOKENS, TASK_TOKENS - TASK_PROMPT_TOKENS
UNCACHED_STEPS = 8
"""Steps that are timed without a cache, spread evenly over the new tokens. The task's time is
their mean times the number of steps."""

GUTENBERG_FRAME = re.compile(r"\*\*\* ?START OF [^\n]*\n(.*)\*\*\* ?END OF ", re.DOTALL)
"""The lines that Project Gutenberg puts around a book."""

MOBY_DICK_URL = "https://www.gutenberg.org/ebooks/2701"


def measure(session: Session) -> Iterator[Measurement]:
    """Yield the rate without a cache at batch 1, and with one at every batch size.

    Raises:
        DataError: the text cannot be read or is too short.
    """
    if session.settings.text is None and not session.settings.tokens:
        text = "task is left out: it reads Moby Dick; save its plain text"
        session.on_notice(f"{text} from {MOBY_DICK_URL} and name it with --text PATH")
        return
    settings, tokens = session.settings, list(session.settings.tokens)
    assert not tokens or len(tokens) > PROMPT_TOKENS, "a trial's text is longer than a prompt"
    variants = []
    for variant in session.variants:
        if variant.tokenizer is None and not tokens:
            reason = "kvlab does not have its tokenizer"
        elif variant.model.config.block_size < TASK_TOKENS:
            reason = f"its block_size is below {TASK_TOKENS}"
        else:
            variants.append(variant)
            continue
        session.on_notice(f"task of {variant.name} is left out: {reason}")
    if not variants:
        return
    texts = {v.name: tokens or read_book(settings.text, v.tokenizer or "") for v in variants}
    yield from _task_lines(session, variants, texts, 1, cached=False)
    for batch in settings.batches:
        yield from _task_lines(session, variants, texts, batch, cached=True)


def _task_lines(
    session: Session, variants: list[Variant], texts: dict[str, list[int]], batch: int, cached: bool
) -> Iterator[Measurement]:
    preparations: dict[str, float] = {}
    works: dict[str, Work] = {v.name: partial(_time_uncached, v) for v in variants}
    if cached:
        time_task = partial(_time_cached, batch, preparations)
        works = {v.name: partial(time_task, v, texts[v.name]) for v in variants}
    session.activity = f"task, batch {batch}"
    timings = session.time_interleaved(works)
    timings.preparations.update(preparations)
    fields = {
        "batch_size": batch,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "context_length": TASK_TOKENS,
        "cached": cached,
    }
    for variant in variants:
        samples = timings.samples[variant.name, "task"]
        median = samples.quantile(0.5)
        reliability = session.reliability(timings, samples, variant)
        if not cached:
            sampled = f"{UNCACHED_STEPS} of {NEW_TOKENS} steps timed"
            reliability["note"] = "; ".join(filter(None, [sampled, reliability["note"]]))
        yield session.make_line(
            "task", "tasks_per_second", variant, batch / median.value, "tasks/s",
            low=batch / median.high, high=batch / median.low, **fields, **reliability,
        )  # fmt: skip
    yield from session.preparation_lines("task", timings, **fields)
    yield from session.compare_variants("task", "task_ratio", "task", timings, **fields)


def read_book(path: Path | None, tokenizer: str) -> list[int]:
    """Return the token ids of a book without Project Gutenberg's frame.

    The lines of each paragraph are joined to one, as in the article.

    Raises:
        DataError: it cannot be read, or has fewer tokens than a prompt.
    """
    assert path is not None
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--text {path} cannot be read ({error}); name a UTF-8 file") from None
    framed = GUTENBERG_FRAME.search(text)
    paragraphs = (framed[1] if framed else text).replace("\r\n", "\n").split("\n\n")
    lines = (
        " ".join(line.strip() for line in paragraph.split("\n")).strip() for paragraph in paragraphs
    )
    ids = load_tokenizer(tokenizer).encode("\n".join(filter(None, lines)))
    if len(ids) <= PROMPT_TOKENS:
        raise DataError(f"--text {path} has {len(ids)} tokens; the task needs over {PROMPT_TOKENS}")
    return ids


def _time_cached(
    batch: int, preparations: dict[str, float], variant: Variant, ids: list[int]
) -> dict[str, list[float]]:
    """Return the seconds of the task, without those that preparing the decode step takes."""
    model, last = variant.model, len(ids) - PROMPT_TOKENS
    # drawn uniformly; the same ones for the same batch size
    starts = np.random.default_rng(batch).integers(0, last + 1, size=batch)
    prompts = [ids[start : start + PROMPT_TOKENS] for start in starts.tolist()]

    def prepare(model: GPT, cache: KVCache) -> Decoder:
        decoder, preparations[variant.name] = time_preparation(model, cache)
        return decoder

    if model.device.type == "cuda":  # the last capture gave the allocator's free memory back
        with torch.inference_mode():
            cache = model.new_cache(batch, TASK_TOKENS, variant.serving)
            prefill(model, torch.tensor(prompts, device=model.device), cache)
    start = time.perf_counter()
    generate(
        model, prompts, NEW_TOKENS, sampling=Sampling(1.0), serving=variant.serving, prepare=prepare
    )
    seconds = time.perf_counter() - start  # generate() reads back its tokens: it waits
    return {"task": [seconds - preparations[variant.name]]}


def _time_uncached(variant: Variant) -> dict[str, list[float]]:
    """Return the seconds of the task from those of some steps, whatever the text."""
    steps = [(2 * i + 1) * NEW_TOKENS // (2 * UNCACHED_STEPS) for i in range(UNCACHED_STEPS)]
    seconds = [time_uncached(variant.model, PROMPT_TOKENS + step) for step in steps]
    return {"task": [NEW_TOKENS * sum(seconds) / len(seconds)]}
