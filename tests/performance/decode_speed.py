"""Cached decode against `transformers` with its static cache: same weights, machine and run."""

import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import product
from statistics import median

import torch

from kvlab.model import GPT
from kvlab.model.generate import make_decoder
from kvlab.spec import ModelConfig
from tests.performance.timing import time_in_turn

STEPS, ROUNDS = 24, 7

Step = Callable[[], torch.Tensor]


@torch.inference_mode()
def run() -> Iterator[str]:
    """Rows of a table: GPT-2 124M in float32, contexts 256 and 1,024, batches 1 and 8."""
    ours = GPT(ModelConfig(preset="gpt2"), seed=0)
    theirs = transformers_model(ours)
    yield f"GPT-2 124M, float32, {torch.get_num_threads()} threads, {STEPS} steps a round,"
    yield f"{ROUNDS} rounds in turn, A B A B (median ms a step; ratio of medians, and of least)"
    yield "context  batch    kvlab  transformers  ratio  least"
    for context, batch in product((256, 1024), (1, 8)):
        text = torch.randint(0, 50257, (batch, context - STEPS))
        mine, other = _kvlab(ours, text), _static(theirs, text, context)
        assert (mine() - other()).abs().max() < 1e-3  # they compute the same logits
        works = {"kvlab": mine, "transformers": other}
        times = time_in_turn(works, ROUNDS, STEPS, time.perf_counter)
        a, b = ([1e3 * one for one in each] for each in times.values())
        line = f"{context:7}  {batch:5}  {median(a):7.2f}  {median(b):12.2f}"
        yield f"{line}  {median(b) / median(a):5.2f}  {min(b) / min(a):5.2f}"


def transformers_model(ours: GPT) -> torch.nn.Module:
    """Return the GPT-2 of `transformers` with the same weights."""
    from transformers import GPT2LMHeadModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        ours.save_pretrained(folder)
        return GPT2LMHeadModel.from_pretrained(folder, attn_implementation="sdpa").eval()


def _kvlab(model: GPT, text: torch.Tensor) -> Step:
    cache = model.new_cache(len(text), text.shape[1] + STEPS)
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
