"""Time per token by context length: windows against global layers."""

import time
from collections.abc import Iterator

import numpy as np
import torch

from kvlab.model import GPT
from kvlab.model.generate import make_decoder
from kvlab.spec import ModelConfig

# Small weights and many K/V: at batch 8 and 4,096 tokens the global layers read 134 MB a step.
SHAPE = {"vocab_size": 512, "block_size": 8192, "n_layer": 4, "n_head": 8, "n_embd": 128}
HORIZONS = {
    "all layers global": {},
    "window of 256, one layer in four global": {"window": 256, "attention_pattern": "GLLL"},
    "window of 256, all layers": {"window": 256, "attention_pattern": "L"},
}
PAST = (512, 1024, 2048, 3072, 4096, 6144, 8000)
BATCH, STEPS, ROUNDS = 8, 8, 9

Curve = list[tuple[int, float]]
"""Points (tokens, seconds)."""


@torch.inference_mode()
def run() -> Iterator[str]:
    yield f"{torch.get_num_threads()} threads, float32"
    yield f"ms a decode step of {BATCH} rows after so many tokens, least of {ROUNDS} rounds in turn"
    costs = _time_steps()
    yield f"{'':40}" + "".join(f"{past:>8,}" for past in PAST) + "   line"
    for name, curve in costs.items():
        cells = "".join(f"{seconds * 1e3:8.2f}" for _, seconds in curve)
        yield f"{name:40}{cells}   {_describe_fit(curve)}"


def _time_steps() -> dict[str, Curve]:
    """Return seconds of a step by tokens in the cache, whose contents are random."""
    steps = {}
    for name, horizon in HORIZONS.items():
        model = GPT(ModelConfig(**SHAPE, position="rope", **horizon))
        cache = model.new_cache(BATCH, SHAPE["block_size"])
        for tensor in cache.tensors:  # fresh zeros would all be one page of memory
            tensor.normal_()
        steps[name] = (cache, make_decoder(model, cache))
    tokens = torch.arange(BATCH)
    least = {(name, past): float("inf") for name in steps for past in PAST}
    for _ in range(ROUNDS):
        for past in PAST:
            for name, (cache, decoder) in steps.items():
                cache.reset()
                cache.advance(past)
                decoder(tokens)
                start = time.perf_counter()
                for _ in range(STEPS):
                    decoder(tokens)
                seconds = (time.perf_counter() - start) / STEPS
                least[name, past] = min(least[name, past], seconds)
    return {name: [(past, least[name, past]) for past in PAST] for name in steps}


def _describe_fit(curve: Curve) -> str:
    """Describe the least-squares line through the points, and its correlation with them."""
    tokens, seconds = np.array(curve).T
    slope, start = np.polyfit(tokens, seconds, 1)
    fits = np.corrcoef(tokens, seconds)[0, 1]
    return f"{start * 1e3:.2f} {slope * 1e6:+.2f} ms per 1,000 tokens, r = {fits:.2f}"
