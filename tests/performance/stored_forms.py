"""Every form of K/V and every setting of attention against multi-head attention, in one run.

A training step and a decode step of each, on one thread, A B C ... A B C ...: the least processor
time of any turn, which other programs of the machine disturb little. A form that takes longer than
its FLOPs explain has its reason in `kvlab/benchmark/LOG.md`. Beside them, decode steps whose cache
has codes, as multiples of those of the same form without.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, SimpleNamespace

import numpy as np
import torch

from kvlab.layout import training_flops
from kvlab.model import GPT
from kvlab.model.generate import make_decoder
from kvlab.model.kernels.malloc import keep_freed_memory
from kvlab.spec import Experiment, ServingConfig
from kvlab.train.train_step import TrainStepper
from tests.performance.timing import least_in_turn

SHAPE = {
    "vocab_size": 4096, "block_size": 512, "n_layer": 4, "n_head": 8, "n_embd": 512,
    "position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False,
}  # fmt: skip
LOCAL = {"window": 128, "attention_pattern": "GLLL"}
FORMS: dict[str, dict[str, object]] = {
    "separate, 8 heads": {},
    "separate, 2 heads": {"n_kv_head": 2},
    "separate, 1 head": {"n_kv_head": 1},
    "tied, 8 heads": {"kv": "tied"},
    "tied, 2 heads": {"kv": "tied", "n_kv_head": 2},
    "grouped_tied, 2 heads": {"kv": "grouped_tied", "n_kv_head": 2},
    "latent 256, rotary 32": {"kv": {"latent": 256, "rotary": 32}},
    "latents 2 x 128, rotary 32": {"kv": {"latent": 128, "rotary": 32, "groups": 2}},
    "window 128 in 3 of 4": LOCAL,
    "the same, sink_tokens 4": {**LOCAL, "sink_tokens": 4},
    "sink: learned": {"sink": "learned"},
    "qk_norm": {"qk_norm": True},
    "rotary_share 0.5": {"rotary_share": 0.5},
    "kv_sharing adjacent:2": {"kv_sharing": "adjacent:2"},
}
TRAINING_ROUNDS, DECODING_ROUNDS, STEPS = 4, 4, 4
CONTEXTS = {(1, 512): 512, (8, 2048): 2048}
"""Rows and tokens that are stored -> the model's context."""

COARSE = {
    "int8": {"kv_dtype": "int8"},
    "int8, groups": {"kv_dtype": "int8", "kv_group": 32},
    "fp8": {"kv_dtype": "fp8"},
    "int4": {"kv_dtype": "int4"},
}
STORED_FORMS = [
    name for name in FORMS if name.startswith(("separate", "tied", "grouped_tied", "latent"))
]
"""Forms that differ in what a token stores."""


def run() -> Iterator[str]:
    """Rows of a table, as multiples of the first form's: time and FLOPs of a training step, their
    quotient, and the time of a decode step at each of `CONTEXTS`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with keep_freed_memory():
            training = least_in_turn(
                {name: _make_training(name) for name in FORMS}, TRAINING_ROUNDS
            )
        decoding = [_compare_decoding(*held) for held in CONTEXTS]
        rows, held = max(CONTEXTS)
        coarse = _compare_codes(rows, held)
    finally:
        torch.set_num_threads(threads)
    flops = {name: training_flops(_describe(name)) for name in FORMS}
    first, steps = next(iter(FORMS)), [f"decode {rows} x {held}" for rows, held in CONTEXTS]
    yield f"{'form':28}training  FLOPs  time a FLOP  {'  '.join(steps)}"
    for name in FORMS:
        times, share = training[name] / training[first], flops[name] / flops[first]
        decoded = "  ".join(f"{each[name] / each[first]:14.2f}" for each in decoding)
        yield f"{name:28}{times:8.2f}  {share:5.2f}  {times / share:11.2f}  {decoded}"
    milliseconds = ", ".join(f"{each[first] * 1e3:.1f}" for each in decoding)
    yield f"of a step at {rows} x {held} without codes: {'  '.join(COARSE)}"
    for name in STORED_FORMS:
        yield f"{name:28}" + "  ".join(f"{coarse[name, how]:5.2f}" for how in COARSE)
    yield f"of the first: {training[first] * 1e3:.0f} ms a training step, decoding {milliseconds}"


def _describe(name: str, block_size: int = 512) -> Experiment:
    training = {"tokens": 2**20, "batch_tokens": 2 * block_size}
    model = {**SHAPE, "block_size": block_size, **FORMS[name]}
    return Experiment(name="form", model=model, training=training, data={"tokenizer": "gpt2:4000"})


def _make_training(name: str) -> Callable[[], object]:
    of = _describe(name)
    text = np.random.default_rng(0).integers(0, 4000, 20 * of.training.batch_tokens)
    data = SimpleNamespace(train=text, validation=text)
    stepper, number = TrainStepper(GPT(of.model), data, of, seed=0), iter(range(10**6))
    return lambda: stepper.step(next(number))


@torch.inference_mode()
def _compare_decoding(rows: int, held: int) -> dict[str, float]:
    """Return the seconds of a decode step that sees about ``held`` tokens, of each form."""
    return least_in_turn(
        {name: _make_decoding(name, rows, held) for name in FORMS}, DECODING_ROUNDS, STEPS
    )


@torch.inference_mode()
def _compare_codes(rows: int, held: int) -> dict[tuple[str, str], float]:
    """Return a decode step with a cache of codes as a multiple of the same form's without."""
    ratios = {}
    for name in STORED_FORMS:
        times = least_in_turn(
            {
                how: _make_decoding(name, rows, held, serving)
                for how, serving in {"plain": {}, **COARSE}.items()
            },
            DECODING_ROUNDS,
            STEPS,
        )
        ratios |= {(name, how): times[how] / times["plain"] for how in COARSE}
    return ratios


def _make_decoding(
    name: str, rows: int, held: int, serving: Mapping[str, object] = MappingProxyType({})
) -> Callable[[], object]:
    model = GPT(_describe(name, held).model)
    cache = model.new_cache(rows, held, ServingConfig(**serving))
    for tensor in cache.tensors:  # a prompt would take longer than the steps
        values = torch.rand(tensor.shape) * (2 if tensor.is_floating_point() else 100)
        tensor.copy_(values.to(tensor.dtype))
    cache.advance(held - (1 + DECODING_ROUNDS) * STEPS)
    decoder, tokens = make_decoder(model, cache), torch.arange(rows)
    return lambda: decoder(tokens)
