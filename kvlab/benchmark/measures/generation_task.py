"""The RTX 4090 article's task: read 256 tokens of Moby Dick, sample 256 more, in tasks/s."""

import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from kvlab.benchmark.decode_timing import PREPARATION_NOTE, time_preparation
from kvlab.benchmark.interleaving import Work
from kvlab.benchmark.measurement import Measurement, TableLayout
from kvlab.benchmark.session import Session, Variant
from kvlab.cache import KVCache
from kvlab.data.tokenizers import load_tokenizer
from kvlab.errors import DataError
from kvlab.model import GPT
from kvlab.model.generate import Decoder, Sampling, generate, make_decoder, prefill
from kvlab.spec.benchmark_config import TASK_PROMPT_TOKENS, TASK_TOKENS

TABLES = (
    TableLayout("256 tokens of Moby Dick + 256 sampled", ("batch_size", "cached"), {
        "tasks_per_second": "tasks/s", "best_tasks_per_second": "best",
        "task_ratio": "time of the first's", "step_preparation": "to prepare a step",
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
    """Yield the rate without a cache at batch 1, with one at every batch size, and the best.

    Raises:
        DataError: the text cannot be read or is too short.
    """
    if session.settings.text is None and not session.settings.tokens:
        text = "task is left out: it reads Moby Dick; save its plain text"
        session.on_notice(f"{text} from {MOBY_DICK_URL} and name it with --text PATH")
        return
    variants = []
    for variant in session.variants:
        reason = _reason_to_skip(session, variant)
        if reason:
            session.on_notice(f"task of {variant.name} is left out: {reason}")
        else:
            variants.append(variant)
    if variants:
        yield from _all_task_lines(session, variants)


def _reason_to_skip(session: Session, variant: Variant) -> str:
    if variant.tokenizer is None and not session.settings.tokens:
        return "kvlab does not have its tokenizer"
    if variant.model.config.block_size < PROMPT_TOKENS + NEW_TOKENS:
        return f"its block_size is below {PROMPT_TOKENS + NEW_TOKENS}"
    return ""


def _all_task_lines(session: Session, variants: list[Variant]) -> Iterator[Measurement]:
    settings = session.settings
    tokens = list(settings.tokens)
    assert not tokens or len(tokens) > PROMPT_TOKENS, "a trial's text is longer than a prompt"
    texts = {v.name: tokens or read_book(settings.text, v.tokenizer or "") for v in variants}
    yield from _task_lines(session, variants, texts, 1, cached=False)
    best: dict[str, tuple[float, Measurement]] = {}
    for batch in settings.batches:
        for line in _task_lines(session, variants, texts, batch, cached=True):
            yield line
            if line.metric != "tasks_per_second":
                continue
            rate = float(line.value or 0.0)
            if line.variant not in best or rate > best[line.variant][0]:
                best[line.variant] = rate, line
    for _, line in best.values():
        note = "; ".join(filter(None, [_best_note(session, line), line.note]))
        yield line.model_copy(update={"metric": "best_tasks_per_second", "note": note})


def _best_note(session: Session, line: Measurement) -> str:
    """Return which batches the best one was selected from."""
    settings = session.settings
    batches = settings.batches
    text = f"best of the batches {', '.join(map(str, batches))}"
    if line.batch_size == batches[-1] and len(batches) > 1:
        text += ", and the largest of them: a larger one may be better"
    if line.variant in session.largest_batches:
        lengths = f"{settings.prompt_tokens} + {settings.new_tokens} tokens"
        text += f"; of {lengths} the largest that fits is {session.largest_batches[line.variant]}"
    return text


def _task_lines(
    session: Session,
    variants: list[Variant],
    texts: dict[str, list[int]],
    batch: int,
    *,
    cached: bool,
) -> Iterator[Measurement]:
    preparations: dict[str, float] = {}
    time_task = partial(_time_cached, preparations) if cached else _time_uncached
    works: dict[str, Work] = {v.name: partial(time_task, v, texts[v.name], batch) for v in variants}
    session.activity = f"task, batch {batch}"
    timings = session.time_interleaved(works)
    fields = {
        "batch_size": batch,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "context_length": PROMPT_TOKENS + NEW_TOKENS,
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
        if seconds := preparations.get(variant.name):
            yield session.make_line(
                "task", "step_preparation", variant, seconds, "s", note=PREPARATION_NOTE, **fields
            )
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


def _draw_prompts(ids: list[int], batch: int) -> list[list[int]]:
    """Draw substrings uniformly; the same ones for the same batch size."""
    last = len(ids) - PROMPT_TOKENS
    starts = np.random.default_rng(batch).integers(0, last + 1, size=batch)
    return [ids[start : start + PROMPT_TOKENS] for start in starts.tolist()]


def _time_cached(
    preparations: dict[str, float], variant: Variant, ids: list[int], batch: int
) -> dict[str, list[float]]:
    """Return the seconds of the task, without those that preparing the decode step takes."""
    prompts, model = _draw_prompts(ids, batch), variant.model

    def prepare(model: GPT, cache: KVCache) -> Decoder:
        decoder, preparations[variant.name] = time_preparation(
            lambda: make_decoder(model, cache), model.device
        )
        return decoder

    if model.device.type == "cuda":  # the last capture gave the allocator's free memory back
        _prefill_once(variant, prompts)
    start = time.perf_counter()
    generate(
        model,
        prompts,
        NEW_TOKENS,
        sampling=Sampling(1.0),
        serving=variant.serving,
        prepare=prepare,
    )
    seconds = time.perf_counter() - start  # generate() reads back its tokens: it waits
    return {"task": [seconds - preparations[variant.name]]}


@torch.inference_mode()
def _prefill_once(variant: Variant, prompts: list[list[int]]) -> None:
    """Run the prompts into a cache of the task's length, which is then discarded."""
    cache = variant.decoder.new_cache(len(prompts), TASK_TOKENS)
    prefill(variant.model, torch.tensor(prompts, device=variant.model.device), cache)


def _time_uncached(variant: Variant, ids: list[int], batch: int) -> dict[str, list[float]]:
    del ids, batch  # the time of a full pass does not depend on the text
    steps = [(2 * i + 1) * NEW_TOKENS // (2 * UNCACHED_STEPS) for i in range(UNCACHED_STEPS)]
    with torch.inference_mode():
        seconds = [variant.decoder.decode_uncached(PROMPT_TOKENS + step) for step in steps]
    return {"task": [NEW_TOKENS * sum(seconds) / len(seconds)]}
