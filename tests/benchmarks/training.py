"""Training against `transformers` in a plain loop: same shape, dtype, batch, optimizer, run.

Each side has a process of its own, in the state that its user's has: kvlab's keeps freed memory
as `kvlab.train.train` does, the plain loop's has malloc as it is. They step in turn, never at
once. bfloat16 is autocast on both sides.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from kvlab.data import training_batch
from kvlab.layout import training_flops
from kvlab.model import GPT
from kvlab.spec import Experiment, load_experiment
from kvlab.train.heap import freed_memory_kept
from kvlab.train.stepper import Stepper

QUICKSTART = Path(__file__).parents[2] / "experiments" / "quickstart.yaml"
WINDOWS = {"attention_pattern": "GLLLLL", "window": 256, "position": "rope"}
PRODUCT = 2048
PRODUCT_FLOPS = 2 * PRODUCT**3


def run() -> Iterator[str]:
    """The quickstart's shape and GPT-2 124M at context 1,024 in both precisions; then 124M with
    hybrid windows against global, and compiled against the rate of a large product."""
    quick = load_experiment(QUICKSTART)
    yield f"{torch.get_num_threads()} threads; tokens/s of the best of the rounds in turn"
    yield "shape       precision  tokens a step    kvlab  transformers  ratio"
    for of, rounds in ((quick, 15), (_large(), 4)):
        for precision in ("float32", "bfloat16"):
            one = _trained(of, precision=precision)
            mine, other = _in_turn(rounds, partial(_kvlab, one), partial(_transformers, one))
            tokens = of.training.batch_tokens
            yield (
                f"{of.name:10}  {precision:9}  {tokens:13,}  {tokens / mine:7,.0f}"
                f"  {tokens / other:12,.0f}  {other / mine:5.2f}"
            )
    shapes = (_large(position="rope"), _large(**WINDOWS))
    whole, hybrid = _in_turn(4, *(partial(_kvlab, shape) for shape in shapes))
    yield f"124M, rope, GLLLLL with window 256 against global: {whole / hybrid:.2f} times as fast"
    for compiled in (False, True):
        one = _trained(_large(), precision="bfloat16", compile=compiled)
        step, product = _in_turn(4, partial(_kvlab, one), partial(_product, one))
        share = training_flops(one) / one.training.steps / step / (PRODUCT_FLOPS / product)
        yield (
            f"124M, bfloat16, {'compiled' if compiled else 'eager'}: {1024 / step:,.0f} tokens/s,"
            f" {share:.0%} of a large product's {PRODUCT_FLOPS / product / 1e9:,.0f} GFLOPs/s"
        )


def _large(**shape: object) -> Experiment:
    """GPT-2 124M, one row of its context a step."""
    model = {"preset": "gpt2", "vocab_size": 50304, **shape}
    return Experiment(
        name="gpt2-124m", model=model, training={"tokens": 2**20, "batch_tokens": 1024}
    )


def _trained(of: Experiment, **changes: object) -> Experiment:
    return of.model_copy(update={"training": of.training.model_copy(update=changes)})


def _product(of: Experiment) -> Callable[[int], float]:
    """One large matrix product in the training's precision."""
    a, b = (torch.ones(PRODUCT, PRODUCT, dtype=getattr(torch, of.training.precision)) for _ in "ab")
    out = a @ b
    return lambda _: float(torch.mm(a, b, out=out)[0, 0])


def _text(of: Experiment) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2000, 10 * of.training.batch_tokens)


def _kvlab(of: Experiment) -> Callable[[int], float]:
    text = _text(of)
    model = GPT(of.model)
    return Stepper(model, SimpleNamespace(train=text, validation=text), of, seed=0).step


def _transformers(of: Experiment) -> Callable[[int], float]:
    """The loop that anybody would write: fused AdamW, the whole batch at once."""
    from transformers import GPT2Config, GPT2LMHeadModel

    m, t, text = of.model, of.training, _text(of)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=m.vocab_size, n_positions=m.block_size, n_embd=m.n_embd,
            n_layer=m.n_layer, n_head=m.n_head, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
            attn_implementation="sdpa",
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(
        model.parameters(), t.learning_rate, (t.beta1, t.beta2), t.adam_eps, t.weight_decay,
        fused=True,
    )  # fmt: skip
    rows, block = t.batch_tokens // m.block_size, m.block_size

    def step(number: int) -> float:
        pair = training_batch(text, seed=0, step=number, batch_size=rows, block_size=block)
        x, y = (torch.from_numpy(part) for part in pair)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=t.precision == "bfloat16"):
            logits = model(x).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), t.clip)
        optimizer.step()
        return loss.item()

    return step


def _in_turn(rounds: int, *sides: "partial[Callable[[int], float]]") -> list[float]:
    """Seconds of each one's fastest step, measured A B A B after a step of warm-up."""
    context = multiprocessing.get_context("spawn")
    best = [float("inf") for _ in sides]
    with ExitStack() as stack:
        ends = []
        for side in sides:
            mine, other = context.Pipe()
            process = context.Process(target=_serve, args=(side, other), daemon=True)
            process.start()
            other.close()  # so that the end of a side that fails is seen
            stack.callback(process.join)
            stack.callback(mine.send, None)  # called first
            ends.append(mine)
        for number in range(rounds + 1):
            for which, end in enumerate(ends):
                end.send(number)
                seconds = end.recv()
                if number:
                    best[which] = min(best[which], seconds)
    return best


def _serve(side: "partial[Callable[[int], float]]", end: Connection) -> None:
    """Makes the step, then answers numbers with the seconds that they took, until None."""
    with ExitStack() as stack:
        if side.func is _kvlab:
            stack.enter_context(freed_memory_kept())
        step = side()
        while (number := end.recv()) is not None:
            began = time.perf_counter()
            step(number)
            end.send(time.perf_counter() - began)
