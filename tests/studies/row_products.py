"""How fast kernels made for products of one row compute the layers of GPT-2 XL, on a GPU.

    python -m tests.studies row_products [--layers 48] [--device cpu]

A decode step at batch 1 is, beside attention, four such products a layer, with norms, GELU and
additions, each of which needs the one before. Three ways compute them in a captured graph: torch,
Inductor with its tuning, and one kernel a product, in the best of several forms for each shape. It
computes the norm of its input in every program, and so needs no kernel for norms. Where it depends
(programmatic dependent launch), it reads its first weights while the kernel ahead still runs.

One line each: microseconds of a product, bytes of weights a second, and their share of what a copy
moves. On CPU, an interpreter computes small layers, and only their errors are printed.
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
from torch.nn.functional import gelu, layer_norm, linear

if "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # which Triton reads when it is imported

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

WIDTH, TINY = 1600, 16
PRODUCTS = {"qkv": (3, 1), "out": (1, 1), "up": (4, 1), "down": (1, 4)}
"""Outputs and inputs of a layer's products, in widths of the model. Attention is left out: the
first width of the first product takes the place of its result."""

WAYS = {
    "qkv": {"norms": True, "activates": False, "adds": False},
    "out": {"norms": False, "activates": False, "adds": True},
    "up": {"norms": True, "activates": True, "adds": False},
    "down": {"norms": False, "activates": False, "adds": True},
}
"""What a product does beside: norm of its input, GELU, addition to the residual stream."""


@triton.jit
def multiply_row(
    x, weights, bias, gain, shift, y, outputs, inputs: tl.constexpr, rows: tl.constexpr,
    width: tl.constexpr, whole: tl.constexpr, norms: tl.constexpr, activates: tl.constexpr,
    adds: tl.constexpr, depends: tl.constexpr,
):  # fmt: skip
    """Write ``weights (outputs, inputs) @ x (inputs,) + bias`` to ``y``, ``rows`` in a program.

    ``width`` inputs are read at a time, the first of the weights before ``x`` is known. ``whole``
    is a power of two of at least ``inputs``.
    """
    if depends:
        gdc_launch_dependents()
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.arange(0, width)[None, :]
    place = weights + row[:, None] * inputs + column
    is_row = row[:, None] < outputs
    tile = tl.load(place, mask=is_row & (column < inputs), other=0.0)
    if depends:
        gdc_wait()
    mean, scale = 0.0, 1.0
    if norms:
        index = tl.arange(0, whole)
        read = tl.load(x + index, mask=index < inputs, other=0.0).to(tl.float32)
        mean = tl.sum(read) / inputs
        read = tl.where(index < inputs, read - mean, 0.0)
        scale = tl.rsqrt(tl.sum(read * read) / inputs + 1e-5)
    total = tl.zeros([rows, width], tl.float32)
    for start in tl.static_range(0, inputs, width):
        is_inside = start + column < inputs
        if start > 0:
            tile = tl.load(place + start, mask=is_row & is_inside, other=0.0)
        read = tl.load(x + start + column, mask=is_inside, other=0.0)
        if norms:
            factor = tl.load(gain + start + column, mask=is_inside, other=0.0).to(tl.float32)
            summand = tl.load(shift + start + column, mask=is_inside, other=0.0).to(tl.float32)
            read = ((read.to(tl.float32) - mean) * scale * factor + summand).to(tile.dtype)
        total += tile.to(tl.float32) * read.to(tl.float32)
    found = tl.sum(total, 1) + tl.load(bias + row, mask=row < outputs, other=0.0).to(tl.float32)
    if activates:  # GELU by tanh, which a sigmoid gives
        found *= tl.sigmoid(1.5957691216 * (found + 0.044715 * found * found * found))
    if adds:
        found += tl.load(y + row, mask=row < outputs, other=0.0).to(tl.float32)
    tl.store(y + row, found.to(y.dtype.element_ty), mask=row < outputs)


@dataclass(frozen=True)
class Form:
    """How the kernel is cut, and whether it starts before the one ahead has ended."""

    rows: int
    width: int
    warps: int
    depends: bool


def list_forms(inputs: int, depends: bool) -> Iterator[Form]:
    """Yield the forms that are tried for rows of so many inputs."""
    whole = triton.next_power_of_2(inputs)
    widths = sorted({min(512, whole), min(2048, whole), whole})
    for width, rows, warps in itertools.product(widths, (1, 2, 4, 8), (4, 8)):
        if 2048 <= rows * width <= 16384 or whole <= 64:
            yield Form(rows, width, warps, depends)


@dataclass
class Layer:
    """Weights, biases and the norms' vectors of a layer, by product."""

    weights: dict[str, Tensor]
    biases: dict[str, Tensor]
    gains: dict[str, Tensor]
    shifts: dict[str, Tensor]


@dataclass
class Layers:
    """All layers, and a place for each product's result; the last two add to the same."""

    layers: list[Layer]
    results: dict[str, Tensor]

    @classmethod
    def make(cls, width: int, layers: int, **of: object) -> "Layers":
        """Return random layers of a width."""

        def make_layer() -> Layer:
            weights, biases, gains, shifts = {}, {}, {}, {}
            for name, (outputs, inputs) in PRODUCTS.items():
                drawn = torch.randn(outputs * width, inputs * width, **of)
                weights[name] = drawn * (inputs * width) ** -0.5
                biases[name] = torch.randn(outputs * width, **of)
                gains[name] = torch.randn(inputs * width, **of)
                shifts[name] = torch.randn(inputs * width, **of)
            return Layer(weights, biases, gains, shifts)

        stream = torch.randn(width, **of)
        results = {"qkv": torch.randn(3 * width, **of), "up": torch.randn(4 * width, **of)}
        return cls(
            [make_layer() for _ in range(layers)], {**results, "out": stream, "down": stream}
        )

    def run(self, forms: dict[str, Form]) -> None:
        """Run the products that have a form, with our kernel, one after the other."""
        stream, qkv, up = (self.results[name] for name in ("out", "qkv", "up"))
        reads = {"qkv": stream, "out": qkv, "up": stream, "down": up}
        for layer in self.layers:
            for name, form in forms.items():
                outputs, inputs = layer.weights[name].shape
                multiply_row[triton.cdiv(outputs, form.rows),](
                    reads[name], layer.weights[name], layer.biases[name], layer.gains[name],
                    layer.shifts[name], self.results[name], outputs, inputs, form.rows, form.width,
                    triton.next_power_of_2(inputs), **WAYS[name], depends=form.depends,
                    num_warps=form.warps, **({"launch_pdl": True} if form.depends else {}),
                )  # fmt: skip

    def time(self, forms: dict[str, Form]) -> float:
        """Return the median seconds of `run` in a captured graph."""
        return time_graph(lambda: self.run(forms))

    def compute(self, x: Tensor) -> Tensor:
        """Return the residual stream after all layers, by torch."""
        width = len(x)
        for layer in self.layers:

            def apply(name: str, x: Tensor, layer: Layer = layer) -> Tensor:
                if WAYS[name]["norms"]:
                    x = layer_norm(x, x.shape, layer.gains[name], layer.shifts[name])
                return linear(x, layer.weights[name], layer.biases[name])

            x = x + apply("out", apply("qkv", x)[:width])
            x = x + apply("down", gelu(apply("up", x), approximate="tanh"))
        return x

    def double(self) -> "Layers":
        """Return the first layer in float64."""
        first = self.layers[0]
        parts = (first.weights, first.biases, first.gains, first.shifts)
        doubled = ({name: one.double() for name, one in part.items()} for part in parts)
        return Layers([Layer(*doubled)], {})

    def find_error(self, forms: dict[str, Form]) -> float:
        """Return the error of one layer by our kernel, as a share of the norm, against float64."""
        x = self.results["out"].clone()
        expected = self.double().compute(x.double())
        Layers(self.layers[:1], self.results).run(forms)
        error = (self.results["out"].double() - expected).norm() / expected.norm()
        self.results["out"].copy_(x)
        return float(error)


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


def measure(layers: int) -> None:
    """Print the lines of all ways."""
    model = Layers.make(WIDTH, layers, device="cuda", dtype=torch.bfloat16)
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / time_graph(lambda: target.copy_(source))
    print(f"a copy moves {copied / 1e9:,.0f} GB/s", flush=True)

    def say(text: str, seconds: float, count: int, names: list[str]) -> None:
        size = sum(model.layers[0].weights[name].nbytes for name in names)
        rate = size * count / seconds
        each = 1e6 * seconds / count / len(names)
        print(f"{text:56} {each:7.2f} us {rate / 1e9:7,.0f} GB/s {rate / copied:5.0%}", flush=True)

    best: dict[bool, dict[str, Form]] = {False: {}, True: {}}
    for depends, name in itertools.product(best, PRODUCTS):
        forms = list_forms(model.layers[0].weights[name].shape[1], depends)
        seconds = {form: model.time({name: form}) for form in forms}
        form = min(seconds, key=seconds.__getitem__)
        best[depends][name] = form
        slowest = 1e6 * max(seconds.values()) / layers
        text = f"{name} {form.rows} x {form.width}, {form.warps} warps, depends {depends}"
        say(f"{text} (slowest {slowest:.1f})", seconds[form], layers, [name])
    for depends, chosen in best.items():
        model.results["out"].normal_()  # additions have run it up
        error = model.find_error(chosen)
        text = f"kernel, depends {depends}, error of a layer {error:.1g}"
        say(text, model.time(chosen), layers, [*PRODUCTS])
    x = torch.randn_like(model.results["out"])
    say("torch", time_graph(lambda: model.compute(x)), layers, [*PRODUCTS])
    few = Layers(model.layers[:12], {})
    options = {"coordinate_descent_tuning": True, "realize_opcount_threshold": 7}
    compiled = torch.compile(few.compute, fullgraph=True, dynamic=False, options=options)
    compiled(x)
    say("Inductor, tuned", time_graph(lambda: compiled(x)), len(few.layers), [*PRODUCTS])


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
    model = Layers.make(TINY, 1, dtype=torch.float32)
    for form in list_forms(TINY, depends=False):
        print(form, f"error {model.find_error(dict.fromkeys(PRODUCTS, form)):.2g}")
