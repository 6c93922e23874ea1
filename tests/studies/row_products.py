"""How fast a kernel made for products of one row reads the weights of GPT-2 XL, on a GPU.

    python -m tests.studies row_products [--layers 48] [--device cpu]

A decode step at batch 1 is four such products a layer, each of which needs the one before. Three
ways compute them in a captured graph: torch's own, Inductor's tuned ones, and a kernel here, in the
best of several forms for each shape. With programmatic dependent launch a kernel reads its first
weights while the one before still runs. One line each: microseconds of a product, bytes of weights
a second, and their share of what a copy moves. On CPU, an interpreter computes small ones.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

if "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # which Triton reads when it is imported

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SHAPES = {"qkv": (4800, 1600), "attention": (1600, 1600), "up": (6400, 1600), "down": (1600, 6400)}
"""Outputs and inputs of each product of a layer, in their order."""
TINY = {"qkv": (48, 16), "attention": (16, 16), "up": (64, 16), "down": (16, 64)}


@triton.jit
def multiply_row(
    x, weights, y, outputs, inputs: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
    depends: tl.constexpr,
):  # fmt: skip
    """Write ``weights (outputs, inputs) @ x (inputs,)`` to ``y``, ``rows`` in a program.

    ``width`` inputs are read at a time, the first of the weights before ``x`` is known.
    """
    if depends:
        gdc_launch_dependents()
    row = (tl.program_id(0) * rows + tl.arange(0, rows))[:, None]
    column = tl.arange(0, width)[None, :]
    place = weights + row * inputs + column
    tile = tl.load(place, mask=(row < outputs) & (column < inputs), other=0.0)
    if depends:
        gdc_wait()
    read = tl.load(x + column, mask=column < inputs, other=0.0)
    total = tile.to(tl.float32) * read.to(tl.float32)
    for start in tl.static_range(width, inputs, width):
        is_inside = start + column < inputs
        tile = tl.load(place + start, mask=(row < outputs) & is_inside, other=0.0)
        read = tl.load(x + start + column, mask=is_inside, other=0.0)
        total += tile.to(tl.float32) * read.to(tl.float32)
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    tl.store(y + row, tl.sum(total, 1).to(y.dtype.element_ty), mask=row < outputs)


@dataclass(frozen=True)
class Form:
    """How the kernel is cut, and whether it starts before the one ahead has ended."""

    rows: int
    width: int
    warps: int
    depends: bool

    def __call__(self, x: Tensor, weights: Tensor, y: Tensor) -> None:
        outputs, inputs = weights.shape
        launch = {"launch_pdl": True} if self.depends else {}
        multiply_row[triton.cdiv(outputs, self.rows),](
            x, weights, y, outputs, inputs, self.rows, self.width, self.depends,
            num_warps=self.warps, **launch,
        )  # fmt: skip


def list_forms(inputs: int, depends: bool) -> Iterator[Form]:
    """Yield the forms that are tried for rows of so many inputs."""
    widest = triton.next_power_of_2(inputs)
    widths = sorted({min(512, widest), min(2048, widest), widest})
    for width, rows, warps in itertools.product(widths, (1, 2, 4, 8), (4, 8)):
        if 2048 <= rows * width <= 16384 or widest <= 64:
            yield Form(rows, width, warps, depends)


@dataclass
class Products:
    """The weights of all layers, a vector to begin with, and a place for each product's result."""

    shapes: dict[str, tuple[int, int]]
    weights: list[dict[str, Tensor]]
    results: dict[str, Tensor]

    @classmethod
    def make(cls, shapes: dict[str, tuple[int, int]], layers: int, **of: object) -> "Products":
        weights = [
            {name: torch.randn(shape, **of) * shape[1] ** -0.5 for name, shape in shapes.items()}
            for _ in range(layers)
        ]
        results = {name: torch.randn(shape[0], **of) for name, shape in shapes.items()}
        return cls(shapes, weights, results)

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What each product reads: the first of the result before."""
        names = list(self.shapes)
        before = [names[-1], *names]
        return {
            name: self.results[one][: self.shapes[name][1]]
            for name, one in zip(names, before, strict=False)
        }

    def run(self, forms: dict[str, Form]) -> None:
        """Run the products that have a form, with our kernel, one after the other."""
        inputs = self.inputs
        for layer in self.weights:
            for name, form in forms.items():
                form(inputs[name], layer[name], self.results[name])

    def time(self, forms: dict[str, Form]) -> float:
        """Return the median seconds of `run` in a captured graph."""
        return time_graph(lambda: self.run(forms))

    def chain(self, x: Tensor) -> Tensor:
        """Return what `run` leaves of the last product, by torch, without writing anywhere."""
        for layer in self.weights:
            for weights in layer.values():
                x = torch.nn.functional.linear(x[: weights.shape[1]], weights)
        return x


def time_graph(run: Callable[[], object]) -> float:
    """Return the median seconds of a captured graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    seconds = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return median(seconds[5:])


def find_error(products: Products, forms: dict[str, Form]) -> float:
    """Return the error of one layer by our kernel, as a share of the norm, against float64."""
    one = Products(products.shapes, products.weights[:1], dict(products.results))
    names = list(one.shapes)
    one.results = {name: result.clone() for name, result in one.results.items()}
    x = one.results[names[-1]].double()
    for weights in one.weights[0].values():
        x = weights.double() @ x[: weights.shape[1]]
    one.run(forms)
    return float((one.results[names[-1]].double() - x).norm() / x.norm())


def measure(layers: int) -> None:
    """Print the lines of all ways."""
    products = Products.make(SHAPES, layers, device="cuda", dtype=torch.bfloat16)
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / time_graph(lambda: target.copy_(source))
    print(f"a copy moves {copied / 1e9:,.0f} GB/s", flush=True)

    def say(text: str, seconds: float, count: int, names: list[str]) -> None:
        size = 2 * sum(SHAPES[name][0] * SHAPES[name][1] for name in names)
        rate = size * count / seconds
        each = 1e6 * seconds / count / len(names)
        print(f"{text:48} {each:7.2f} us {rate / 1e9:7,.0f} GB/s {rate / copied:5.0%}", flush=True)

    best: dict[bool, dict[str, Form]] = {False: {}, True: {}}
    for depends, name in itertools.product(best, SHAPES):
        forms = list_forms(SHAPES[name][1], depends)
        seconds = {form: products.time({name: form}) for form in forms}
        form = min(seconds, key=seconds.__getitem__)
        best[depends][name] = form
        say(f"{name} {form}".replace("Form", ""), seconds[form], layers, [name])
        print("    slowest", f"{1e6 * max(seconds.values()) / layers:.2f} us of", len(seconds))
    for depends, forms in best.items():
        error = find_error(products, forms)
        text = f"kernel, depends {depends}, error {error:.1g}"
        say(text, products.time(forms), layers, [*SHAPES])
    start = products.results["down"]
    say("torch", time_graph(lambda: products.chain(start)), layers, [*SHAPES])
    few = Products(SHAPES, products.weights[:12], products.results)
    options = {"coordinate_descent_tuning": True}
    compiled = torch.compile(few.chain, fullgraph=True, dynamic=False, options=options)
    compiled(start)
    count = len(few.weights)
    say("Inductor, tuned", time_graph(lambda: compiled(start)), count, [*SHAPES])


@torch.inference_mode()
def main() -> None:
    """Measure, or compute small products on CPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.device == "cuda":
        measure(options.layers)
        return
    products = Products.make(TINY, 1, dtype=torch.float32)
    for form in list_forms(TINY["qkv"][1], depends=False):
        print(form, f"error {find_error(products, dict.fromkeys(TINY, form)):.2g}")
