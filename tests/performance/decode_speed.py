"""Cached decode against `transformers` with its static cache: same weights, machine and run.

And with an int8 cache against a plain one, which has a limit.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch

from kvlab.model import GPT
from kvlab.model.generate import make_decoder
from kvlab.spec import ModelConfig, ServingConfig
from tests.performance.timing import LimitMissed, time_in_turn

STEPS, ROUNDS = 24, 7

MOST_FOR_INT8 = 1.5
"""Times as long as with a plain cache that a step with an int8 one may take on CPU."""

Step = Callable[[], torch.Tensor]


@torch.inference_mode()
def run() -> Iterator[str]:
    """Rows of two tables: GPT-2 124M in float32, contexts 256 and 1,024, batches 1 and 8.

    Raises:
        LimitMissed: a step with an int8 cache takes over `MOST_FOR_INT8` times as long as without.
    """
    ours = GPT(ModelConfig(preset="gpt2"), seed=0)
    theirs = transformers_model(ours)
    yield f"GPT-2 124M, float32, {torch.get_num_threads()} threads, {STEPS} steps a round,"
    yield f"{ROUNDS} rounds in turn, A B A B (median ms a step; ratio of medians, and of least)"
    yield "context  batch    kvlab  transformers  ratio  least"
    for context, text in _prompts():
        mine, other = _kvlab(ours, text), _static(theirs, text, context)
        assert (mine() - other()).abs().max() < 1e-3  # they compute the same logits
        yield _compare(context, text, mine, other)[0]
    ratios = []
    yield "context  batch    plain          int8  ratio  least"
    for context, text in _prompts():
        coarse = _kvlab(ours, text, ServingConfig(kv_dtype="int8"))
        line, ratio = _compare(context, text, _kvlab(ours, text), coarse)
        ratios.append(ratio)
        yield line
    if max(ratios) > MOST_FOR_INT8:
        text = f"{max(ratios):.2f} times as long as with a plain one"
        raise LimitMissed(f"a step with an int8 cache takes {text}; {MOST_FOR_INT8} is the most")


def _prompts() -> Iterator[tuple[int, torch.Tensor]]:
    for context in (256, 1024):
        for batch in (1, 8):
            yield context, torch.randint(0, 50257, (batch, context - STEPS))


def _compare(context: int, text: torch.Tensor, *pair: Step) -> tuple[str, float]:
    """Time both steps; return a row, and the second's least time over the first's."""
    works = dict(zip("ab", pair, strict=True))
    times = time_in_turn(works, ROUNDS, STEPS, time.perf_counter)
    a, b = ([1e3 * one for one in each] for each in times.values())
    line = f"{context:7}  {len(text):5}  {median(a):7.2f}  {median(b):12.2f}"
    ratio = min(b) / min(a)
    return f"{line}  {median(b) / median(a):5.2f}  {ratio:5.2f}", ratio


def transformers_model(ours: GPT) -> torch.nn.Module:
    """Return the GPT-2 of `transformers` with the same weights."""
    from transformers import GPT2LMHeadModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        ours.save_pretrained(folder)
        return GPT2LMHeadModel.from_pretrained(folder, attn_implementation="sdpa").eval()


def _kvlab(model: GPT, text: torch.Tensor, serving: ServingConfig | None = None) -> Step:
    cache = model.new_cache(len(text), text.shape[1] + STEPS, serving)
    model.hidden_states(text, cache)
    decoder = make_decoder(model, cache)
    tokens = torch.arange(len(text))

    def once() -> torch.Tensor:
        if cache.length == cache.max_length:
            cache.reset()
            cache.advance(text.shape[1])
        return decoder(tokens)

    return once


def _static(model: torch.nn.Module, text: torch.Tensor, context: int) -> Step:
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=context)
    at = torch.arange(text.shape[1])
    model(text, past_key_values=cache, cache_position=at, use_cache=True, logits_to_keep=1)
    tokens, state = torch.arange(len(text))[:, None], {"at": text.shape[1]}

    def once() -> torch.Tensor:
        if state["at"] == context:
            for layer in cache.layers:  # back to the prompt's end
                layer.cumulative_length.fill_(text.shape[1])
            state["at"] = text.shape[1]
        position = torch.tensor([state["at"]])
        state["at"] += 1
        out = model(tokens, past_key_values=cache, cache_position=position, use_cache=True)
        return out.logits[:, -1]

    return once
