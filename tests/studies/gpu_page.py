"""`make gpu`: what kvlab claims for a GPU, each claim tried on the one here, as one page.

    python -m tests.studies gpu_page [--device cuda] [--tiny] [--only decoders training] [--out FILE]

Nothing is downloaded. It needs torch and kvlab's other requirements, no Ray and no MLflow; what
else is missing (pytest, transformers, a second GPU) leaves a claim unmeasured, with the reason.
``--tiny`` tries the same on models of seconds, as the tests do on CPU: its figures mean nothing.
"""

import argparse
import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._dynamo.utils import calculate_time_spent

from kvlab.benchmark.decode_timing import DecodeRun
from kvlab.benchmark.device_peaks import device_name
from kvlab.benchmark.measurement import Measurement, StopRule
from kvlab.benchmark.measures import decode_latency, decode_roofline, decode_throughput
from kvlab.benchmark.session import BenchmarkSettings, Session, Variant
from kvlab.cache.static_pass import StaticPass
from kvlab.layout import training_flops
from kvlab.layout.gpu_sharing import is_mps_running, stop_mps
from kvlab.layout.roofline_model import DevicePeaks
from kvlab.model import GPT, attention
from kvlab.model.attention_backends import BACKENDS
from kvlab.model.causal_mask import CausalMask
from kvlab.model.generate import EagerDecoder, GraphDecoder, StaticDecoder, prefill
from kvlab.own_extensions import load_parts
from kvlab.spec import Experiment, ModelConfig, ServingConfig
from kvlab.train.loop import train
from kvlab.train.mfu import find_peak_flops
from kvlab.train.train_step import TrainStepper
from kvlab.train.training_record import load_training_record

ROOT = Path(__file__).parents[2]
LARGE = {"preset": "gpt2", "vocab_size": 50304}
TINY = {"vocab_size": 300, "block_size": 64, "n_layer": 2, "n_head": 4, "n_embd": 32}
WINDOWS = {"attention_pattern": "GLLLLL", "position": "rope"}


@dataclass(frozen=True)
class Claim:
    """One line of the page. ``held`` is None for what could not be measured here."""

    text: str
    held: bool | None
    figure: str


@dataclass(frozen=True)
class Setting:
    """Where the claims are tried, and how large."""

    device: str
    is_tiny: bool
    is_rehearsal: bool = False

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    def model(self, **changes: Any) -> ModelConfig:
        window = {"window": 16 if self.is_tiny else 256} if "attention_pattern" in changes else {}
        return ModelConfig(**{**(TINY if self.is_tiny else LARGE), **changes, **window})

    def pick(self, large: Any, tiny: Any) -> Any:
        return tiny if self.is_tiny else large

    @property
    def timed_seconds(self) -> float:
        """How long each thing is timed."""
        return 0.01 if self.is_tiny or self.is_rehearsal else 5.0

    def make_model(self, config: ModelConfig, dtype: torch.dtype) -> GPT:
        """Return a model with weights drawn on the device, where that takes no time."""
        model = GPT(config, device="meta", dtype=dtype).to_empty(device=self.device)
        if config.tie_embeddings:
            model.lm_head.weight = model.token_embedding.weight
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.02)
        return model.eval()

    def find_lack(self, module: str = "") -> str:
        """Return why what needs a CUDA device, and a module, cannot be tried; empty if it can."""
        if not self.is_cuda:
            return "no CUDA device"
        return "" if not module or can_import(module) else f"no {module} here"


def can_import(module: str) -> bool:
    """Return whether a module is here and works with what else is."""
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def check_marked_tests(setting: Setting) -> Iterator[Claim]:
    """The tests that need a CUDA device, several at a time; those that fail, once more alone."""
    text = "the tests marked gpu pass"
    if lack := setting.find_lack("pytest"):
        yield Claim(text, None, lack)
        return
    # not the whole suite, which imports what a box with a GPU may lack
    files = [str(p) for p in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in p.read_text()]
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "--durations=10", *sorted(files)]
    workers = max(SIDE_BY_SIDE, (os.cpu_count() or 1) * 3 // 4)
    together = [] if setting.find_lack("xdist") else ["-n", str(workers)]
    with _ending_mps():
        code, last = _stream([*command, *together])
        if code == 1 and together:
            code, last = _stream([*command, "--last-failed"])
    yield Claim(text, code == 0, last)


def _stream(command: list[str]) -> tuple[int, str]:
    """Run a command, print what it prints; return its exit status and its last line."""
    last = "no output"
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return process.returncode, last


SIDE_BY_SIDE = 6
"""Processes that check what is not timed, and share the device."""


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@contextmanager
def _ending_mps() -> Iterator[None]:
    """End the MPS that was started inside: a process that it serves must not be killed."""
    was_running = is_mps_running()
    try:
        yield
    finally:
        if not was_running:
            stop_mps()


FUZZED_SECONDS = 100.0


def check_fuzzer(setting: Setting) -> Iterator[Claim]:
    """Random configurations against the dense float64 reference."""
    cases, workers = setting.pick((500, SIDE_BY_SIDE), (5, 1))
    study = [sys.executable, "-m", "tests.studies", "fuzz_model", "--device", setting.device]
    commands = [
        [*study, "--cases", str(cases), "--first", str(cases * worker),
         "--seconds", str(FUZZED_SECONDS)]
        for worker in range(workers)
    ]  # fmt: skip
    with ThreadPoolExecutor(workers) as pool:
        ended = list(pool.map(_run, commands))
    found = [re.search(r"(\d+) cases, (\d+) disagreements\Z", one.stdout.strip()) for one in ended]
    for one in ended:
        if one.returncode:
            print(one.stdout[-4000:], one.stderr[-4000:])
    differ = [line.split(":")[0] for one in ended for line in one.stdout.splitlines()
              if line.startswith("case ")]  # fmt: skip
    figure = f"{sum(int(counts[1]) for counts in found if counts):,} random models"
    figure += f", {len(differ)} differ {', '.join(differ[:5])}".rstrip()
    is_held = all(found) and not any(one.returncode for one in ended)
    if not all(found):
        figure += f", {found.count(None)} of {workers} processes failed"
    yield Claim("models and caches compute what the reference does", is_held, figure)


TIED, GROUPED, LATENTS = (
    {"position": "rope", "kv": kv} for kv in ("tied", "grouped_tied", {"latent": 16, "rotary": 8})
)
DECODED = {
    "float32": ("float32", {}, {}),
    "bfloat16": ("bfloat16", {}, {}),
    "int8": ("bfloat16", {}, {"kv_dtype": "int8"}),
    "int8 under float32": ("float32", {"n_kv_head": 1}, {"kv_dtype": "int8"}),
    "fp8": ("bfloat16", {}, {"kv_dtype": "fp8"}),
    "rings": ("bfloat16", WINDOWS, {}),
    "fp8 rings and sinks": ("bfloat16", {**WINDOWS, "sink_tokens": 4}, {"kv_dtype": "fp8"}),
    "ties": ("bfloat16", {}, {"tie": "adjacent:2"}),
    "compiled": ("float32", {}, {"compile": True}),
    "compiled int8 rings": ("bfloat16", WINDOWS, {"kv_dtype": "int8", "compile": True}),
}
"""Name -> dtype, changes of the model, serving."""

if "tied_kv" in load_parts():
    DECODED |= {
        "K = V": ("bfloat16", TIED, {}),
        "int8 K = V": ("bfloat16", TIED, {"kv_dtype": "int8"}),
        "int4 GTA": ("bfloat16", GROUPED, {"kv_dtype": "int4", "kv_group": 8}),
    }
if "latent_kv" in load_parts():
    DECODED |= {
        "latents": ("bfloat16", LATENTS, {}),
        "fp8 latents in groups": ("bfloat16", LATENTS, {"kv_dtype": "fp8", "kv_group": 8}),
    }

DECODED_TOLERANCE = {"float32": 2e-3, "bfloat16": 0.08}
"""The largest error of a row's logits, as a share of their norm. A code of a coarse cache may
round to its neighbour."""


def check_decoders(setting: Setting) -> Iterator[Claim]:
    """The captured step against the eager one, rows of different lengths."""
    for name, (dtype, _, serving) in DECODED.items():
        text = f"the captured step computes what the eager one does: {name}"
        if setting.is_tiny and serving.get("compile"):
            yield Claim(text, None, "to compile takes longer than all else of a tiny run")
            continue
        error = compare_decoders(setting, name)
        figure = f"largest error of a row's logits {error:.2g} of their norm"
        yield Claim(text, error < DECODED_TOLERANCE[dtype], figure)


@torch.inference_mode()
def compare_decoders(setting: Setting, name: str, broken: str | None = None) -> float:
    """Return the largest error of a row's logits, of both steps of an entry of `DECODED`.

    Args:
        broken: what to break in the captured step, of `BROKEN`.
    """
    dtype, changes, serving = DECODED[name]
    length, steps = setting.pick(300, 20), 8
    model = GPT(setting.model(**changes), device=setting.device)
    sharpen_attention(model)
    model = model.to(getattr(torch, dtype)).eval()
    tokens = torch.randint(300, (3, length), device=setting.device)
    logits = []
    for is_static in (False, True):
        cache = model.new_cache(3, length + steps, ServingConfig(**serving))
        prefill(model, tokens, cache, [length, length - 7, 3])
        with break_step(broken if is_static else None):
            if is_static:
                make = GraphDecoder if setting.is_cuda else StaticDecoder
                step = make(model, cache, compiles=cache.compiles_steps)
            else:
                step = EagerDecoder(model, cache)
            logits.append(torch.stack([step(tokens[:, i]).double() for i in range(steps)]))
    errors = (logits[1] - logits[0]).norm(dim=-1) / logits[0].norm(dim=-1)
    return float("inf") if errors.isnan().any() else float(errors.max())


def sharpen_attention(model: GPT) -> None:
    """Add noise to the weights, by which attention picks a few keys: at the start it averages."""
    generator = torch.Generator(model.device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            std = 1.3 * model.config.n_embd**-0.5
            noise = torch.empty_like(parameter).normal_(0, std, generator=generator)
            parameter.add_(noise)


BROKEN = {
    "attention": (
        attention,
        "attend_decoded",
        lambda q, _k, v, *_: q.new_zeros(*q.shape[:3], v.shape[-1]),
    ),
    "newest key": (StaticPass, "write_kv", lambda *_: None),
}
"""What a captured step can lack -> what takes the place of which function."""


@contextmanager
def break_step(broken: str | None) -> Iterator[None]:
    """Let steps in the block lack something of `BROKEN`."""
    if broken is None:
        yield
    else:
        with mock.patch.object(*BROKEN[broken]):
            yield


def check_decode_speed(setting: Setting) -> Iterator[Claim]:
    """Ceilings, the share of them that a step of GPT-2 XL reaches, coarse caches of 124M."""
    large = _time_steps(setting, "gpt2-xl", {"model": {}, "compiled": {"compile": True}})
    bandwidth = _find_value(large, "bandwidth", None)
    products = _find_value(large, "product_bandwidth", None)
    share = products / bandwidth
    figure = f"{products / 1e9:,.0f} of {bandwidth / 1e9:,.0f} GB/s, {share:.0%}"
    yield Claim("one-row products reach 70% of the bandwidth", share >= 0.7, figure)
    steps = [line.variant for line in large if line.metric == "mbu" and line.batch_size == 1]
    for name in steps:
        mbu = _find_value(large, "mbu", name, batch_size=1)
        step = _find_line(large, "tpot", name, cached=True)
        kind = "decode step" if name == "model" else "compiled decode step"
        text = f"a {kind} of GPT-2 XL in bfloat16 at batch 1 uses 60% of the bandwidth"
        figure = f"{mbu:.0%}, {1e3 * (step.value or 0):.3f} ms, by {step.attention}"
        yield Claim(text, mbu >= 0.6, figure)
    coarse = {name: {"kv_dtype": name} for name in ("model", "int8", "fp8")}
    small = _time_steps(setting, "gpt2", coarse)
    for name in [*coarse][1:]:
        text = f"a step with a cache in {name} is no slower than with one in the model's dtype"
        batches = {1, *(line.batch_size for line in small if line.part == "throughput")}
        for batch in sorted(batches):
            if not any(line.metric == "tpot_ratio" for line in small):
                yield Claim(f"{text}, batch {batch}", None, "no scipy here, which compares times")
                continue
            ratio = _find_value(small, "tpot_ratio", name, batch_size=batch)
            yield Claim(f"{text}, batch {batch}", ratio <= 1.02, f"{ratio:.2f} times as long")


def _time_steps(
    setting: Setting, preset: str, servings: dict[str, dict[str, Any]]
) -> list[Measurement]:
    """Return latency and roofline of one model, served in several ways; tiny: uncompiled ones.

    With several stored forms also those of a batch.
    """
    dtype = torch.bfloat16 if setting.is_cuda else torch.float32
    config = setting.model() if setting.is_tiny else ModelConfig(preset=preset)
    model = setting.make_model(config, dtype)
    variants = [
        Variant(name, model, ServingConfig(**serving))
        for name, serving in servings.items()
        if setting.is_cuda or not serving.get("compile")
    ]
    rounds = 2 if setting.is_rehearsal else setting.pick(12, 4)
    settings = BenchmarkSettings(
        prompt_tokens=setting.pick(512, 16), new_tokens=setting.pick(64, 4),
        contexts=(setting.pick(512, 16),), batches=(setting.pick(8, 2),),
        stop_rule=StopRule(min_rounds=min(4, rounds), max_rounds=rounds, seconds=30),
    )  # fmt: skip
    session = Session(variants, settings)
    if setting.is_tiny or setting.is_rehearsal:  # measuring them takes half a minute
        name = str(dtype).removeprefix("torch.")
        session.device_peaks[name] = DevicePeaks("tiny", name, 0, 1e10, 1e11, 1e10)
    measures = [decode_latency, decode_roofline]
    if any("kv_dtype" in serving for serving in servings.values()):
        measures.insert(1, decode_throughput)
    return [line for one in measures for line in one.measure(session)]


def _find_line(
    lines: list[Measurement], metric: str, variant: str | None, **fields: Any
) -> Measurement:
    return next(
        line for line in lines
        if line.metric == metric
        and variant in (None, line.variant)
        and all(getattr(line, name) == wanted for name, wanted in fields.items())
    )  # fmt: skip


def _find_value(lines: list[Measurement], metric: str, variant: str | None, **fields: Any) -> float:
    return float(_find_line(lines, metric, variant, **fields).value or 0.0)


LIMITED_BYTES = 12 * 2**30
"""What the largest batch may use: with all of a large GPU, prefills would take most of the time.
Beside the cache is 1 GB of activations, whatever the batch, and with MQA 0.13 of the cache in
logits. Of 4 GiB that would be over a quarter."""


def check_batch_limit(setting: Setting) -> Iterator[Claim]:
    """The largest batch by trying, beside that by formula."""
    from kvlab.extensions.limit.measure import measure as measure_limit

    if lack := setting.find_lack():
        yield Claim("the cache decides the largest batch", None, lack)
        return
    shapes, of = {"MHA": {}, "MQA": {"n_kv_head": 1}}, {"device": "cuda", "dtype": torch.bfloat16}
    variants = [
        Variant(name, GPT(setting.model(**each), **of).eval(), ServingConfig())
        for name, each in shapes.items()
    ]
    lengths = {"prompt_tokens": setting.pick(448, 16), "new_tokens": setting.pick(64, 4)}
    settings = BenchmarkSettings(
        **lengths, contexts=(), batches=(1,), stop_rule=StopRule(), options={"limit": LIMITED_BYTES}
    )  # fmt: skip
    lines = list(measure_limit(Session(variants, settings)))
    for name in shapes:
        tried, formula = (
            next(int(x.value or 0) for x in lines if (x.variant, x.metric) == (name, metric))
            for metric in ("largest_batch", "largest_batch_formula")
        )
        text = f"the cache decides the largest batch of {name}, within a quarter"
        yield Claim(text, tried >= 0.75 * formula, f"{tried:,} by trying, {formula:,} by formula")


@dataclass(frozen=True)
class TrainedSteps:
    """How long the median step of a training takes, and what ran."""

    seconds: float
    of: Experiment
    kernels: str

    @property
    def tokens(self) -> int:
        return self.of.training.batch_tokens


def _train_steps(
    setting: Setting, rows: int, recipe: dict[str, Any] | None = None, **changes: Any
) -> TrainedSteps:
    """Train compiled and in bfloat16, up to 64 rows in a pass."""
    config = setting.model(**changes)
    rows = setting.pick(rows, 2)
    of = Experiment(
        name="speed",
        model=config,
        data={} if not setting.is_tiny else {"tokenizer": "bytes"},
        benchmark={"prompt_tokens": 8, "new_tokens": 8},
        training={
            "tokens": rows * config.block_size * 100, "batch_tokens": rows * config.block_size,
            "precision": "bfloat16", "compile": setting.is_cuda, **(recipe or {}),
        },
        resources={
            "gpus": int(setting.is_cuda), "microbatch_tokens": min(64, rows) * config.block_size,
        },
    )  # fmt: skip
    text = np.random.default_rng(0).integers(0, 256, 10 * of.training.batch_tokens)
    text = text.astype(np.uint16)
    model = GPT(config, device=setting.device)
    stepper = TrainStepper(model, SimpleNamespace(train=text, validation=text), of, seed=0)
    seconds = _median_step(stepper.step, setting.timed_seconds)
    return TrainedSteps(seconds, of, ", ".join(sorted(stepper.attention or [])))


def _median_step(step: Callable[[int], object], seconds: float) -> float:
    """Return the median time of steps that wait for the device, after three."""
    for number in range(3):
        step(number)
    times: list[float] = []
    while not times or sum(times) < seconds:
        start = time.perf_counter()
        step(3 + len(times))
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


STEP_ROWS = 512
"""Rows of 1,024 tokens in a step of the recipe of GPT-2 (half a million tokens)."""


def check_training_speed(setting: Setting) -> Iterator[Claim]:
    """124M, bfloat16, compiled, in steps of half a million tokens: its MFU, and what changes it."""
    rows = 64 if setting.is_rehearsal else STEP_ROWS
    learned = _train_steps(setting, rows)
    peak, origin = find_peak_flops(torch.device(setting.device), "bfloat16")
    tokens = learned.tokens
    mfu = training_flops(learned.of) / learned.of.training.steps / learned.seconds / peak
    figure = f"{mfu:.1%} of a {origin} peak, {tokens / learned.seconds:,.0f} tokens/s, by"
    yield Claim("training reaches 50% MFU", mfu >= 0.5, f"{figure} {learned.kernels}")

    def compare(text: str, limit: float, **changes: Any) -> Claim:
        other = _train_steps(setting, rows, **changes)
        ratio = other.seconds / learned.seconds
        return Claim(text, ratio <= limit, f"{ratio:.3f} times as long, by {other.kernels}")

    yield compare("rotary positions train within 3% of learned ones", 1.03, position="rope")
    text = "rotary positions and windows of 256 train within 3% of learned positions and all tokens"
    yield compare(text, 1.03, **WINDOWS)
    text = "a residual stream in bfloat16 trains faster than one in float32"
    yield compare(text, 1.0, recipe={"residual": "bfloat16"})


def check_windows(setting: Setting) -> Iterator[Claim]:
    """FlexAttention, which trains windows, beside the dense kernel, forward and backward."""
    text = "FlexAttention trains a window of 256 in 1,024 tokens faster than the dense kernel"
    if lack := setting.find_lack():
        yield Claim(text, None, lack)
        return
    shape, dtype = setting.pick((64, 12, 1024, 64), (1, 2, 256, 16)), torch.bfloat16
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for _ in range(3))
    ways = {"flex": CausalMask(shape[2] // 4), "sdpa": CausalMask()}

    def attend(name: str, mask: CausalMask) -> Callable[[int], object]:
        def step(_number: int) -> float:
            BACKENDS[name].attend(q, k, v, mask).sum().backward()
            return float(q.grad.flatten()[0])  # waits for the device

        return step

    seconds = min(2.0, setting.timed_seconds)
    times = {name: _median_step(attend(name, mask), seconds) for name, mask in ways.items()}
    figure = ", ".join(f"{name} {time * 1e3:.2f} ms" for name, time in times.items())
    yield Claim(text, times["flex"] <= times["sdpa"], figure)


def check_peers(setting: Setting) -> Iterator[Claim]:
    """GPT-2 in plain torch, as nanoGPT trains it, and that of `transformers`, both compiled and in
    the same sizes: training, and decoding at batch 1."""
    texts = {
        "training": "training is no slower than compiled transformers",
        "decode": "a decode step at batch 1 is no slower than compiled transformers'",
    }
    steps = _train_steps(setting, 16)
    ours, of, seconds = steps.seconds, steps.of, setting.timed_seconds
    figure = f"{ours * 1e3:,.1f} ms a step of {of.training.batch_tokens:,} tokens, "
    plain_model = PlainGPT(of.model)
    plain = _train_peer(setting, seconds, of, plain_model, plain_model)
    text = "training is no slower than a compiled GPT-2 in plain torch, in nanoGPT's form"
    yield Claim(text, ours <= plain, f"{figure}that {plain * 1e3:,.1f} ms")
    if not can_import("transformers"):
        yield from (Claim(text, None, "no transformers here") for text in texts.values())
        return
    peer = _make_transformers(setting)
    theirs = _train_peer(setting, seconds, of, lambda x, y: peer(x, labels=y).loss, peer)
    figure += f"transformers {theirs * 1e3:,.1f} ms"
    yield Claim(texts["training"], ours <= theirs, figure)
    ours, theirs = _decode_beside_transformers(setting)
    figure = f"{ours * 1e3:.3f} ms a token, transformers {theirs * 1e3:.3f} ms"
    yield Claim(texts["decode"], ours <= theirs, figure)


def _make_transformers(setting: Setting) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = setting.model()
    sizes = {
        "vocab_size": config.vocab_size, "n_positions": config.block_size,
        "n_embd": config.n_embd, "n_layer": config.n_layer, "n_head": config.n_head,
        "bos_token_id": 0, "eos_token_id": None,
    }  # fmt: skip
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts)).to(setting.device)


class PlainGPT(torch.nn.Module):
    """GPT-2 in plain torch, in the form of nanoGPT: the loss of tokens (R, T)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        nn, width = torch.nn, config.n_embd
        self.heads = config.n_head
        self.tokens = nn.Embedding(config.vocab_size, width)
        self.positions = nn.Embedding(config.block_size, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "norm1": nn.LayerNorm(width), "qkv": nn.Linear(width, 3 * width),
                "proj": nn.Linear(width, width), "norm2": nn.LayerNorm(width),
                "up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width),
            })
            for _ in range(config.n_layer)
        )  # fmt: skip
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        functions = torch.nn.functional
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for layer in self.layers:
            q, k, v = (
                part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for part in layer["qkv"](layer["norm1"](x)).chunk(3, -1)
            )
            y = functions.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer["proj"](y.transpose(1, 2).flatten(2))
            hidden = functions.gelu(layer["up"](layer["norm2"](x)), approximate="tanh")
            x = x + layer["down"](hidden)
        logits = functions.linear(self.norm(x), self.tokens.weight)
        return functions.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _train_peer(
    setting: Setting,
    seconds: float,
    of: Experiment,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    model: torch.nn.Module,
) -> float:
    """Return the seconds of a step in bfloat16; ``loss_of`` takes tokens and targets (R, T)."""
    model.train().to(setting.device)
    compiled = torch.compile(loss_of) if setting.is_cuda else loss_of
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=setting.is_cuda or None)
    shape = (of.training.batch_tokens // of.model.block_size, of.model.block_size)

    def step(_number: int) -> None:
        tokens = torch.randint(of.model.vocab_size, shape, device=setting.device)
        with torch.autocast(setting.device, torch.bfloat16):
            loss = compiled(tokens, tokens)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()

    return _median_step(step, seconds)


@torch.inference_mode()
def _decode_beside_transformers(setting: Setting) -> tuple[float, float]:
    """Return the seconds of a token here and there: greedy, after the same prompt."""
    dtype = torch.bfloat16 if setting.is_cuda else torch.float32
    prompt, new = setting.pick((512, 64), (16, 4))
    model = GPT(setting.model(), device=setting.device, dtype=dtype).eval()
    serving = ServingConfig(compile=setting.is_cuda)
    run = DecodeRun(model, model.new_cache(1, prompt + new, serving), new)
    run.time()
    ours = sorted(run.time()["steps"])[new // 2]
    peer = _make_transformers(setting).eval().to(dtype)
    tokens = torch.zeros(1, prompt, dtype=torch.int64, device=setting.device)
    options = {"do_sample": False, "attention_mask": torch.ones_like(tokens), "pad_token_id": 0}
    if setting.is_cuda:  # which transformers then compiles
        options["cache_implementation"] = "static"

    def generate(count: int) -> float:
        start = time.perf_counter()
        peer.generate(tokens, max_new_tokens=count, min_new_tokens=count, **options).tolist()
        return time.perf_counter() - start

    for _ in range(2):
        generate(new)
        generate(1)
    theirs = sorted((generate(new) - generate(1)) / (new - 1) for _ in range(5))[2]
    return ours, theirs


TRAINED = """\
name: gpu-page
model: {{vocab_size: 257, block_size: {block}, n_layer: 4, n_head: 4, n_embd: {width}}}
data: {{source: files, tokenizer: bytes, paths: [texts], validation_fraction: 0.2}}
training: {{tokens: {tokens}, batch_tokens: {batch}, evaluate_every: {every}, evaluate_tokens: 256,
  precision: bfloat16, checkpoint_every: {every}}}
evaluation: {{loss_tokens: 256}}
benchmark: {{prompt_tokens: 8, new_tokens: 8, repeats: 1}}
resources: {{{resources}}}
"""

SWEEP = """\
question: Does a small sweep run on this GPU?
experiment: e.yaml
factors: {heads: {mha: {}, mqa: {model.n_kv_head: 1}}}
seeds: SEEDS
report: {sections: [answer, cells, failures]}
"""


@dataclass
class SmallSweep:
    """A sweep of a few trials in a folder, as a user submits it.

    Args:
        resources: the section of the experiment.
    """

    folder: Path
    resources: str
    seeds: int = 1
    executor: str = "inline"

    def write(self, **shape: int) -> "SmallSweep":
        draw, words = random.Random(0), ["cache", "key", "value", "token", "reads", "the", "every"]
        (self.folder / "texts").mkdir()
        for number in range(40):
            text = " ".join(draw.choices(words, k=300))
            (self.folder / "texts" / f"{number:02}.txt").write_text(f"{text}\n")
        sizes = {"block": 64, "batch": 256, "width": 16, "tokens": 10_240, "every": 10, **shape}
        (self.folder / "e.yaml").write_text(TRAINED.format(resources=self.resources, **sizes))
        (self.folder / "s.yaml").write_text(SWEEP.replace("SEEDS", str(list(range(self.seeds)))))
        return self

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "kvlab", "submit", "s.yaml", "--executor", self.executor,
                "--store", "runs", "--reports", "reports"]  # fmt: skip

    @property
    def options(self) -> dict[str, Any]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        data = {"PYTHONPATH": path, "KVLAB_DATA": f"{self.folder}/data"}
        return {"cwd": self.folder, "env": {**os.environ, **data}}

    def submit(self, *more: str) -> str:
        """Run it to its end; return what it printed."""
        done = subprocess.run([*self.command, *more], **self.options, capture_output=True,
                              text=True, check=False, timeout=600)  # fmt: skip
        return done.stdout + done.stderr

    def kill_after_a_checkpoint(self) -> None:
        with subprocess.Popen([*self.command, "--no-smoke"], **self.options, start_new_session=True,
                              stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as first:  # fmt: skip
            while first.poll() is None and not any(
                (self.folder / "runs").rglob("checkpoints/step-*")
            ):
                time.sleep(0.05)
            if first.poll() is None:
                os.killpg(first.pid, signal.SIGKILL)

    @property
    def results(self) -> list[dict[str, Any]]:
        """The trials' results. A folder of the record may list one twice."""
        found = [json.loads(p.read_text()) for p in (self.folder / "runs").rglob("result.json")]
        return list({one["trial"]: one for one in found}.values())

    @property
    def has_report(self) -> bool:
        return any((self.folder / "reports").rglob("report.md"))


def check_sweep(setting: Setting) -> Iterator[Claim]:
    """A sweep of two trials inline, killed in its midst, and run again to its report."""
    with tempfile.TemporaryDirectory() as folder:
        sweep = SmallSweep(Path(folder), f"gpus: {int(setting.is_cuda)}").write(
            width=setting.pick(256, 16), tokens=setting.pick(51_200, 10_240)
        )
        sweep.kill_after_a_checkpoint()
        output = sweep.submit("--no-smoke").strip()
        results, is_reported, tail = sweep.results, sweep.has_report, output.splitlines()[-1:]
    ended = [one["status"] for one in results]
    resumed = [step for one in results for step in one["training_record"]["resumed_from"]]
    figure = f"trials {', '.join(ended) or 'none'}; {' '.join(tail)}"
    is_done = ended == ["done", "done"]
    yield Claim("a sweep runs inline to its end", is_done, figure[:200])
    absent = re.search(r"no report: (\w+) is not installed", output)
    figure = f"no {absent[1]} here" if absent else "report.md"
    yield Claim("and to its report", None if absent else is_reported, figure)
    text = "a training that was killed goes on from its checkpoint"
    yield Claim(text, bool(resumed) if is_done else None, f"resumed from step {resumed or 'none'}")


PACKED = {"width": 256, "block": 256, "batch": 4096, "tokens": 300 * 4096, "every": 100}
"""Trials of some seconds, in steps that leave most of a GPU idle."""


def check_packing(setting: Setting) -> Iterator[Claim]:
    """Eight trials, one after the other and side by side on one GPU.

    Without Ray, which measures how many fit, four inline sweeps of two trials share the GPU.
    """
    text = "eight small trials that share a GPU take half of their time one by one, or less"
    if not setting.is_cuda:
        yield Claim(text, None, setting.find_lack())
        return
    if setting.find_lack("ray"):
        alone, shared = (_time_sweeps(1, 4, "gpus: 1"), _time_sweeps(4, 1, "gpus: 0.25"))
        figure = f"{shared / alone:.2f} times as long, four sweeps each with 0.25 of a GPU, inline"
        yield Claim(text, shared <= 0.5 * alone, figure)
        return
    seconds, shares = {}, set()
    for resources in ("gpus: 1", "gpus: auto"):
        with tempfile.TemporaryDirectory() as folder, _ending_mps():
            sweep = SmallSweep(Path(folder), resources, seeds=4, executor="ray")
            sweep.write(**PACKED)
            start = time.monotonic()
            tail = sweep.submit().strip().splitlines()[-1:]
            seconds[resources] = time.monotonic() - start
            results = sweep.results
        if [one["status"] for one in results] != ["done"] * 8:
            yield Claim(text, False, f"{len(results)} results; {' '.join(tail)}"[:200])
            return
        shares = {one["experiment"]["resources"]["gpus"] for one in results}
    ratio = seconds["gpus: auto"] / seconds["gpus: 1"]
    figure = f"{ratio:.2f} times as long, each with {', '.join(map(str, sorted(shares)))} of a GPU"
    yield Claim(text, ratio <= 0.5, figure)


def _time_sweeps(count: int, seeds: int, resources: str) -> float:
    """Return the seconds of inline sweeps that run at once, of two trials a seed each."""
    with ExitStack() as stack:
        stack.enter_context(_ending_mps())
        folders = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(count)]
        sweeps = [SmallSweep(Path(folder), resources, seeds).write(**PACKED) for folder in folders]
        start = time.monotonic()
        with ThreadPoolExecutor(count) as pool:
            said = list(pool.map(lambda sweep: sweep.submit("--no-smoke"), sweeps))
        seconds = time.monotonic() - start
        for sweep, output in zip(sweeps, said, strict=True):
            ended = [one["status"] for one in sweep.results]
            if ended != ["done"] * 2 * seeds:
                raise RuntimeError(f"trials {ended or 'none'}: {output.strip().splitlines()[-1:]}")
    return seconds


def check_two_processes(setting: Setting) -> Iterator[Claim]:
    """Data-parallel training: the loss of two processes beside that of one, and as a sweep."""
    backend = "nccl" if setting.is_cuda else "gloo"
    text = f"two processes that train together over {backend} lose what one does"
    count = torch.cuda.device_count() if setting.is_cuda else 2
    if count < 2:
        yield Claim(text, None, f"{count} GPUs here")
        return
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{folder}/meeting"
        torch.multiprocessing.spawn(_train_together, (backend, address, f"{folder}/two"), nprocs=2)
        together = load_training_record(Path(folder, "two"))
        _train_small(setting.device, f"{folder}/one", workers=1)
        alone = load_training_record(Path(folder, "one"))
    losses = [record.validation_curve[-1][2] for record in (together, alone)]
    difference = abs(losses[0] - losses[1])
    figure = f"{together.workers} processes {losses[0]:.6f}, one {losses[1]:.6f} nats/token"
    yield Claim(text, together.workers == 2 and difference < 1e-3, figure)
    text = "a sweep with `gpus: 2` runs to its end"
    if lack := setting.find_lack("ray"):
        yield Claim(text, None, lack)
        return
    with tempfile.TemporaryDirectory() as folder:
        sweep = SmallSweep(Path(folder), "gpus: 2", executor="ray").write()
        tail = sweep.submit().strip().splitlines()[-1:]
        results = sweep.results
    workers = [one["training_record"]["workers"] for one in results if one["status"] == "done"]
    figure = f"trials of {', '.join(map(str, workers)) or 'no'} workers; {' '.join(tail)}"
    yield Claim(text, workers == [2, 2], figure[:200])


def _train_together(rank: int, backend: str, address: str, folder: str) -> None:
    torch.set_num_threads(1)
    device = "cpu" if backend == "gloo" else f"cuda:{rank}"
    if device != "cpu":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(backend, init_method=address, rank=rank, world_size=2)
    _train_small(device, folder, workers=2)
    torch.distributed.destroy_process_group()


def _train_small(device: str, folder: str, workers: int) -> None:
    """Train twenty steps of four rows, two of them in a pass."""
    steps = {"tokens": 5120, "batch_tokens": 256, "evaluate_tokens": 256, "evaluate_every": 20}
    of = Experiment(
        name="together", model={**TINY, "vocab_size": 257, "n_head": 2},
        data={"tokenizer": "bytes"}, benchmark={"prompt_tokens": 8, "new_tokens": 8},
        training=steps, resources={"workers": workers, "microbatch_tokens": 128},
    )  # fmt: skip
    text = np.random.default_rng(0).integers(0, 257, 20_000).astype(np.uint16)
    texts = SimpleNamespace(train=text, validation=text)
    train(GPT(of.model, seed=0), texts, of, seed=0, directory=folder, device=device)


Check = Callable[[Setting], Iterator[Claim]]
UNTIMED: dict[str, Check] = {
    "decoders": check_decoders,
    "fuzzer": check_fuzzer,
    "tests": check_marked_tests,
    "sweep": check_sweep,
}
"""What runs side by side."""

REHEARSED = ("training", "windows")
"""What compiles for a minute before it is timed. Decode steps are tuned by timings, so other work
must not run beside their compilation."""

CHECKS: dict[str, Check] = {
    **UNTIMED,
    "training": check_training_speed,
    "windows": check_windows,
    "decode": check_decode_speed,
    "peers": check_peers,
    "limit": check_batch_limit,
    "packing": check_packing,
    "nccl": check_two_processes,
}


def run_check(setting: Setting, name: str, path: Path) -> None:
    """Write the claims of a check to ``path``, a line each, as soon as they are decided."""
    with path.open("a") as file:

        def add(claim: Claim) -> None:
            print(f"{_HELD[claim.held]:12}  {claim.text}: {claim.figure}", flush=True)
            file.write(json.dumps(asdict(claim)) + "\n")
            file.flush()

        try:
            for claim in CHECKS[name](setting):
                add(claim)
        except Exception as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            add(Claim(f"the check `{name}` runs to its end", False, text))
        file.write(json.dumps(calculate_time_spent().get("total_wall_time", 0.0)))


@dataclass(frozen=True)
class Checked:
    """What a check found, its seconds, and how many of them it compiled."""

    claims: list[Claim]
    seconds: float
    compiling: float = 0.0


def isolate_check(setting: Setting, name: str, limit: float) -> Checked:
    """Run a check in a process of its own, for at most ``limit`` seconds.

    A device error makes a process useless, and a kernel may never end.
    """
    print(f"== {name}{' (rehearsal)' if setting.is_rehearsal else ''}", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "claims")
        command = [sys.executable, "-m", "tests.studies", "gpu_page", "--device", setting.device]
        command += ["--tiny"] if setting.is_tiny else []
        command += ["--rehearse"] if setting.is_rehearsal else []
        command += ["--run", name, "--out", str(path)]
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        failure = ""
        try:
            if code := process.wait(limit):
                failure = f"its process ended with {code}"
        except subprocess.TimeoutExpired:
            failure = f"it took over {limit:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    claims = [Claim(**one) for one in found if isinstance(one, dict)]
    if failure:
        claims.append(Claim(f"the check `{name}` runs to its end", False, failure))
    compiling = sum(one for one in found if isinstance(one, float))
    return Checked(claims, time.monotonic() - start, compiling)


_HELD = {True: "held", False: "NOT HELD", None: "not measured"}


def format_section(name: str, checked: Checked) -> str:
    """Return the part of the page that has what a check found."""
    lines = [f"## {name}\n", "| claim | | figure |", "|---|---|---|"]
    for claim in checked.claims:
        figure = claim.figure.replace("|", "/")
        lines.append(f"| {claim.text} | {_HELD[claim.held]} | {figure} |")
    compiling = f", {checked.compiling:.0f} of them compiling" if checked.compiling >= 1 else ""
    return "\n".join([*lines, "", f"{checked.seconds:.0f} s{compiling}.", ""])


class Page:
    """The page, written anew after each check. Sections of checks that do not run now stay."""

    def __init__(self, setting: Setting, path: Path):
        self.path, self.lock = path, Lock()
        before = path.read_text() if path.exists() else ""
        parts = re.split(r"^(?=## )", before, flags=re.MULTILINE)[1:]
        self.sections = {part.split()[1]: part.strip() + "\n" for part in parts}
        name = device_name(torch.device(setting.device))
        lines = [f"# kvlab on {name}\n"]
        lines.append("Written by `make gpu`. Every claim was tried on this device.")
        if setting.is_tiny:
            lines.append("**The models were tiny: the figures of speed mean nothing.**")
        cuda = f"CUDA {torch.version.cuda or 'none'}"
        lines += ["", f"torch {torch.__version__}, {cuda}, Python {sys.version.split()[0]}.", ""]
        self.head = "\n".join(lines)

    def add(self, name: str, checked: Checked) -> None:
        with self.lock:
            self.sections[name] = format_section(name, checked)
            known = [self.sections[name] for name in CHECKS if name in self.sections]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text("\n".join([self.head, *known]))


def run_checks(
    setting: Setting, names: list[str], page: Page, minutes: float, limit: float
) -> bool:
    """Run checks and write their page; return whether no claim failed.

    What is not timed runs side by side. What is timed runs so once before, for as long as it takes
    to compile: the compiler keeps what it made.

    Args:
        minutes: after which no further check is begun.
        limit: seconds that a check may take.
    """
    begun, held = time.monotonic(), []

    def run(name: str) -> None:
        if time.monotonic() - begun > 60 * minutes:
            text = f"over {minutes:g} minutes; `python -m tests.studies gpu_page --only {name}`"
            checked = Checked([Claim(f"what the check `{name}` tries", None, text)], 0.0)
        else:
            checked = isolate_check(setting, name, limit)
        held.extend(claim.held is not False for claim in checked.claims)
        page.add(name, checked)

    def rehearse(name: str) -> None:
        isolate_check(replace(setting, is_rehearsal=True), name, limit / 2)

    with ThreadPoolExecutor(len(CHECKS)) as pool:
        list(pool.map(run, [name for name in names if name in UNTIMED]))
        if setting.is_cuda and not setting.is_tiny:
            list(pool.map(rehearse, [name for name in names if name in REHEARSED]))
    for name in names:
        if name not in UNTIMED:
            run(name)
    return all(held)


def main(arguments: list[str] | None = None) -> int:
    """Try the claims and write the page; return 1 if one of them did not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no check after them")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds of a check")
    parser.add_argument("--run", choices=list(CHECKS), help=argparse.SUPPRESS)
    parser.add_argument("--rehearse", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    setting = Setting(options.device, options.tiny, options.rehearse)
    if options.run:  # in a process of its own
        run_check(setting, options.run, options.out)
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device is visible; `kvlab doctor` says why. On CPU: --device cpu --tiny")
        return 2
    slug = re.sub(r"[^a-z0-9]+", "-", device_name(torch.device(setting.device)).lower()).strip("-")
    path = options.out or ROOT / "reports" / "gpu" / f"{slug}.md"
    page = Page(setting, path)
    all_held = run_checks(setting, options.only, page, options.minutes, options.limit)
    print(path)
    return int(not all_held)
