"""Training with int8 products against float32, of the same shapes, in turn, in one run.

The least processor time of a step in any turn, on one thread. A shape in which int8 is slower is
printed as every other.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import torch

from kvlab.layout import training_flops
from kvlab.model import GPT
from kvlab.model.kernels.int8 import select_int8_kernel
from kvlab.model.kernels.malloc import keep_freed_memory
from kvlab.spec import Experiment
from kvlab.train.train_step import TrainStepper
from tests.performance.timing import least_in_turn

WIDTHS = {64: 2048, 256: 2048, 768: 1024}
"""n_embd -> tokens of a step."""
MLPS = ("gelu", "swiglu")
PRODUCTS = ["output", "grad_input", "grad_weight"]
WAYS: dict[str, dict[str, object]] = {
    "float32": {},
    "output": {"int8": PRODUCTS[:1]},
    "output, grad_input": {"int8": PRODUCTS[:2]},
    "all three": {"int8": PRODUCTS},
}
ROUNDS = 5


def run() -> Iterator[str]:
    """Tokens per second of every way, and its speed as a multiple of float32's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    kernel = select_int8_kernel(torch.device("cpu"))
    yield f"codes are multiplied by {kernel}; {torch.backends.cpu.get_cpu_capability()}"
    yield f"{'in int8':29}{'n_embd':>6}  {'mlp':6}  tokens/s  GFLOP/s  times float32's speed"
    try:
        with keep_freed_memory():
            for width, tokens in WIDTHS.items():
                for mlp in MLPS:
                    yield from _compare(width, mlp, tokens)
    finally:
        torch.set_num_threads(threads)


def _compare(width: int, mlp: str, tokens: int) -> Iterator[str]:
    of = {name: _describe(width, mlp, tokens, way) for name, way in WAYS.items()}
    found = least_in_turn({name: _make_step(one) for name, one in of.items()}, ROUNDS)
    for name, seconds in found.items():
        flops = training_flops(of[name]) / of[name].training.steps / seconds / 1e9
        speed = found["float32"] / seconds
        yield f"{name:29}{width:6}  {mlp:6}{tokens / seconds:10,.0f}{flops:9.1f}{speed:9.2f}"


def _describe(width: int, mlp: str, tokens: int, way: dict[str, object]) -> Experiment:
    model = {
        "vocab_size": 2048, "block_size": 256, "n_layer": 4, "n_head": width // 32,
        "n_embd": width, "position": "rope", "mlp": mlp,
    }  # fmt: skip
    training = {"tokens": 2**20, "batch_tokens": tokens, **way}
    data = {"tokenizer": "bytes"}
    return Experiment(name="int8", model=model, data=data, training=training)


def _make_step(of: Experiment) -> Callable[[], object]:
    text = np.random.default_rng(0).integers(0, 2048, 20 * of.training.batch_tokens)
    data = SimpleNamespace(train=text, validation=text)
    stepper, number = TrainStepper(GPT(of.model), data, of, seed=0), iter(range(10**6))
    stepper.connect_workers()
    return lambda: stepper.step(next(number))
