"""`make gpu`: what kvlab claims for a GPU, each claim tried on the one here, as one page.

    python -m tests.gpu_page [--device cuda] [--tiny] [--only decoders training] [--out FILE]

Nothing is downloaded. It needs torch and kvlab's other requirements, no Ray and no MLflow; what
else is missing (pytest, transformers, a second GPU) leaves a claim unmeasured, with the reason.
``--tiny`` tries the same on models of seconds, as the tests do on CPU: its figures mean nothing.
"""

import argparse
import importlib.util
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
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvlab.benchmark.device_peaks import device_name
from kvlab.benchmark.measurement import StopRule
from kvlab.benchmark.measures import decode_latency, decode_roofline, max_batch
from kvlab.benchmark.session import BenchmarkSettings, Session, Variant
from kvlab.layout import training_flops
from kvlab.layout.roofline_model import DevicePeaks
from kvlab.model import GPT
from kvlab.model.generate import EagerDecoder, GraphDecoder, StaticDecoder, prefill
from kvlab.spec import Experiment, ModelConfig, ServingConfig
from kvlab.train.mfu import find_peak_flops
from kvlab.train.train_step import TrainStepper
from tests import fuzz_model

ROOT = Path(__file__).parents[1]
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

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    def model(self, **changes: Any) -> ModelConfig:
        window = {"window": 16 if self.is_tiny else 256} if "attention_pattern" in changes else {}
        return ModelConfig(**{**(TINY if self.is_tiny else LARGE), **changes, **window})

    def pick(self, large: Any, tiny: Any) -> Any:
        return tiny if self.is_tiny else large


def check_marked_tests(setting: Setting) -> Iterator[Claim]:
    """The tests that need a CUDA device."""
    text = "the tests marked gpu pass"
    if not setting.is_cuda or importlib.util.find_spec("pytest") is None:
        yield Claim(text, None, "no CUDA device" if not setting.is_cuda else "no pytest here")
        return
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).strip().splitlines()
    yield Claim(text, done.returncode == 0, lines[-1] if lines else "no output")


def check_fuzzer(setting: Setting) -> Iterator[Claim]:
    """Random configurations against the dense float64 reference."""
    count, failures = setting.pick(1000, 5), []
    for number in range(count):
        case = fuzz_model.draw_case(number)
        if not fuzz_model.run_case(case, setting.device) <= fuzz_model.TOLERANCE[case.dtype]:
            failures.append(number)
    figure = f"{count} random models, {len(failures)} differ"
    yield Claim("models and caches compute what the reference does", not failures, figure)


DECODED = {
    "float32": ("float32", {}, {}, 1e-3),
    "bfloat16": ("bfloat16", {}, {}, 0.1),
    "int8": ("bfloat16", {}, {"kv_dtype": "int8"}, 0.1),
    "int8 under float32": ("float32", {"n_kv_head": 1}, {"kv_dtype": "int8"}, 1e-3),
    "fp8": ("bfloat16", {}, {"kv_dtype": "fp8"}, 0.1),
    "rings": ("bfloat16", WINDOWS, {}, 0.1),
    "ties": ("bfloat16", {}, {"tie": "adjacent:2"}, 0.1),
}
"""Name -> dtype, changes of the model, serving, and the largest difference of a logit."""


@torch.inference_mode()
def check_decoders(setting: Setting) -> Iterator[Claim]:
    """The captured step against the eager one, rows of different lengths."""
    decoder = GraphDecoder if setting.is_cuda else StaticDecoder
    length, steps = setting.pick(300, 20), 8
    for name, (dtype, changes, serving, tolerance) in DECODED.items():
        model = GPT(setting.model(**changes), device=setting.device, dtype=getattr(torch, dtype))
        tokens = torch.randint(300, (3, length), device=setting.device)
        logits = []
        for make in (EagerDecoder, decoder):
            cache = model.eval().new_cache(3, length + steps, ServingConfig(**serving))
            prefill(model, tokens, cache, [length, length - 7, 3])
            step = make(model, cache)
            logits.append(torch.stack([step(tokens[:, i]).clone() for i in range(steps)]))
        error = float((logits[0] - logits[1]).abs().max())
        text = f"the captured step computes what the eager one does: {name}"
        yield Claim(text, error < tolerance, f"largest difference of a logit {error:.2g}")


def check_decode_speed(setting: Setting) -> Iterator[Claim]:
    """Ceilings, the share of them that a step reaches, and coarse caches against bfloat16."""
    dtype = torch.bfloat16 if setting.is_cuda else torch.float32
    model = GPT(setting.model(), device=setting.device, dtype=dtype).eval()
    caches = ("model", "int8", "fp8")
    variants = [Variant(name, model, ServingConfig(kv_dtype=name)) for name in caches]
    settings = BenchmarkSettings(
        prompt_tokens=setting.pick(512, 16),
        new_tokens=setting.pick(64, 4),
        contexts=(setting.pick(512, 16),),
        batches=(setting.pick(8, 2),),
        stop_rule=StopRule(min_rounds=4, max_rounds=setting.pick(20, 4), seconds=30),
    )
    session = Session(variants, settings)
    if setting.is_tiny:  # measuring them takes half a minute
        name = str(dtype).removeprefix("torch.")
        session.device_peaks[name] = DevicePeaks("tiny", name, 0, 1e10, 1e11, 1e10)
    lines = [*decode_latency.measure(session), *decode_roofline.measure(session)]

    def value(metric: str, variant: str | None = "model", **fields: Any) -> float:
        found = next(
            line for line in lines
            if line.metric == metric
            and variant in (None, line.variant)
            and all(getattr(line, name) == wanted for name, wanted in fields.items())
        )  # fmt: skip
        return float(found.value or 0.0)

    bandwidth, products = value("bandwidth", None), value("product_bandwidth", None)
    share = products / bandwidth
    figure = f"{products / 1e9:,.0f} of {bandwidth / 1e9:,.0f} GB/s, {share:.0%}"
    yield Claim("one-row products reach 70% of the bandwidth", share >= 0.7, figure)
    mbu, step = value("mbu", batch_size=1), value("tpot", cached=True)
    yield Claim(
        "a decode step at batch 1 uses 60% of the bandwidth",
        mbu >= 0.6,
        f"{mbu:.0%}, {step * 1e3:.3f} ms",
    )
    for name in caches[1:]:
        ratio = value("tpot_ratio", name)
        text = f"a step with a cache in {name} is no slower than with one in the model's dtype"
        yield Claim(text, ratio <= 1.02, f"{ratio:.2f} times as long, batch 1")


def check_batch_limit(setting: Setting) -> Iterator[Claim]:
    """The largest batch by trying, beside that by formula."""
    if not setting.is_cuda:
        yield Claim("the cache decides the largest batch", None, "no CUDA device")
        return
    shapes = {"MHA": {}, "MQA": {"n_kv_head": 1}}
    variants = [
        Variant(name, GPT(setting.model(**each), device=setting.device).eval(), ServingConfig())
        for name, each in shapes.items()
    ]
    lengths = {"prompt_tokens": setting.pick(448, 16), "new_tokens": setting.pick(64, 4)}
    settings = BenchmarkSettings(
        **lengths, contexts=(), batches=(1,), stop_rule=StopRule()
    )  # fmt: skip
    lines = list(max_batch.measure(Session(variants, settings)))
    for name in shapes:
        tried, formula = (
            next(int(x.value or 0) for x in lines if (x.variant, x.metric) == (name, metric))
            for metric in ("largest_batch", "largest_batch_formula")
        )
        text = f"the cache decides the largest batch of {name}, within a quarter"
        yield Claim(text, tried >= 0.75 * formula, f"{tried:,} by trying, {formula:,} by formula")


def _train_steps(setting: Setting, seconds: float, **changes: Any) -> tuple[float, Experiment]:
    """Return the seconds of the median step, compiled and in bfloat16, and what was trained."""
    config = setting.model(**changes)
    rows = setting.pick(64, 2)
    of = Experiment(
        name="speed",
        model=config,
        data={} if not setting.is_tiny else {"tokenizer": "bytes"},
        benchmark={"prompt_tokens": 8, "new_tokens": 8},
        training={
            "tokens": rows * config.block_size * 100, "batch_tokens": rows * config.block_size,
            "precision": "bfloat16", "compile": setting.is_cuda,
        },
    )  # fmt: skip
    text = np.random.default_rng(0).integers(0, 256, 10 * of.training.batch_tokens)
    model = GPT(config, device=setting.device)
    stepper = TrainStepper(model, SimpleNamespace(train=text, validation=text), of, seed=0)
    for step in range(3):
        stepper.step(step)
    times: list[float] = []
    while not times or sum(times) < seconds:
        start = time.perf_counter()
        stepper.step(3 + len(times))
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2], of


def check_training_speed(setting: Setting) -> Iterator[Claim]:
    """124M, bfloat16, compiled: its MFU, rotary positions and windows."""
    seconds = setting.pick(10.0, 0.01)
    learned, of = _train_steps(setting, seconds)
    peak = find_peak_flops(torch.device(setting.device), "bfloat16")
    tokens = of.training.batch_tokens
    mfu = training_flops(of) / of.training.steps / learned / peak.flops_per_second
    figure = f"{mfu:.0%} of a {peak.origin} peak, {tokens / learned:,.0f} tokens/s"
    yield Claim("training reaches 50% MFU", mfu >= 0.5, figure)
    rotary, _ = _train_steps(setting, seconds, position="rope")
    text = "rotary positions train within 3% of learned ones"
    yield Claim(text, rotary <= 1.03 * learned, f"{rotary / learned:.3f} times as long")
    windows, _ = _train_steps(setting, seconds, **WINDOWS)
    text = "windows of 256 train no slower than global attention"
    yield Claim(text, windows <= 1.01 * rotary, f"{windows / rotary:.3f} times as long")


TRAINED = """\
name: gpu-page
model: {{vocab_size: 257, block_size: {block}, n_layer: 4, n_head: 4, n_embd: {width}}}
data: {{source: files, tokenizer: bytes, paths: [texts], validation_fraction: 0.2}}
training: {{tokens: {tokens}, batch_tokens: {batch}, evaluate_every: 20, evaluate_tokens: {batch},
  precision: bfloat16, checkpoint_every: 5}}
evaluation: {{loss_tokens: {batch}}}
benchmark: {{prompt_tokens: 8, new_tokens: 8, repeats: 1}}
resources: {{gpus: {gpus}}}
"""

SWEEP = """\
question: Does a small sweep run on this GPU?
experiment: e.yaml
factors: {heads: {mha: {}, mqa: {model.n_kv_head: 1}}}
report: {sections: [answer, cells, failures]}
"""


def check_sweep(setting: Setting) -> Iterator[Claim]:
    """A sweep of two trials inline, killed in its midst, and run again to its report."""
    with tempfile.TemporaryDirectory() as folder:
        shape = {"block": 64, "width": setting.pick(256, 16), "batch": 256}
        _write_sweep(Path(folder), gpus=int(setting.is_cuda), tokens=setting.pick(256_000, 10_240),
                     **shape)  # fmt: skip
        command = [sys.executable, "-m", "kvlab", "submit", "s.yaml", "--executor", "inline",
                   "--store", "runs", "--reports", "reports", "--no-smoke"]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "KVLAB_DATA": f"{folder}/data"}
        options = {"cwd": folder, "env": environment}
        checkpoints = Path(folder) / "runs"
        with subprocess.Popen(command, **options, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT,
                              start_new_session=True) as first:  # fmt: skip
            while first.poll() is None and not any(checkpoints.rglob("checkpoints/step-*")):
                time.sleep(0.05)
            if first.poll() is None:
                os.killpg(first.pid, signal.SIGKILL)
        done = subprocess.run(command, **options, capture_output=True, text=True, check=False)
        found = [json.loads(path.read_text()) for path in checkpoints.rglob("result.json")]
        results = list({one["trial"]: one for one in found}.values())
        ended = [one["status"] for one in results]
        resumed = [step for one in results for step in one["training_record"]["resumed_from"]]
        tail = (done.stdout + done.stderr).strip().splitlines()[-1:]
        report = list((Path(folder) / "reports").rglob("report.md"))
    figure = f"trials {', '.join(ended) or 'none'}; {' '.join(tail)}"
    is_done = ended == ["done", "done"] and bool(report)
    yield Claim("a sweep runs inline to its report", is_done, figure[:200])
    text = "a training that was killed goes on from its checkpoint"
    yield Claim(text, bool(resumed) if is_done else None, f"resumed from step {resumed or 'none'}")


def _write_sweep(folder: Path, **shape: Any) -> None:
    draw, words = random.Random(0), ["cache", "key", "value", "token", "reads", "the", "every"]
    (folder / "texts").mkdir()
    for number in range(40):
        text = " ".join(draw.choices(words, k=300))
        (folder / "texts" / f"{number:02}.txt").write_text(f"{text}\n")
    (folder / "e.yaml").write_text(TRAINED.format(**shape))
    (folder / "s.yaml").write_text(SWEEP)


def check_two_gpus(setting: Setting) -> Iterator[Claim]:
    """Data-parallel training, which needs Ray."""
    text = "two processes train together over NCCL"
    count = torch.cuda.device_count() if setting.is_cuda else 0
    if count < 2 or importlib.util.find_spec("ray") is None:
        yield Claim(text, None, f"{count} GPUs here" if count < 2 else "no Ray here")
        return
    command = [sys.executable, "-m", "pytest", "-q", "tests/trial/test_ddp.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    yield Claim(text, done.returncode == 0, (done.stdout.strip().splitlines() or [""])[-1])


CHECKS: dict[str, Callable[[Setting], Iterator[Claim]]] = {
    "tests": check_marked_tests,
    "fuzzer": check_fuzzer,
    "decoders": check_decoders,
    "decode": check_decode_speed,
    "training": check_training_speed,
    "limit": check_batch_limit,
    "sweep": check_sweep,
    "nccl": check_two_gpus,
}


def run_checks(setting: Setting, names: list[str]) -> dict[str, tuple[list[Claim], float]]:
    """Return the claims and the seconds of each check. One that fails is a claim not held."""
    found = {}
    for name in names:
        print(f"== {name}", flush=True)
        claims, start = [], time.monotonic()
        try:
            for claim in CHECKS[name](setting):
                print(f"{_HELD[claim.held]:12}  {claim.text}: {claim.figure}", flush=True)
                claims.append(claim)
        except Exception as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            claims.append(Claim(f"the check `{name}` runs to its end", False, text))
        found[name] = claims, time.monotonic() - start
    return found


_HELD = {True: "held", False: "NOT HELD", None: "not measured"}


def format_page(setting: Setting, found: dict[str, tuple[list[Claim], float]]) -> str:
    """Return the page."""
    name = device_name(torch.device(setting.device))
    lines = [
        f"# kvlab on {name}",
        "",
        "Written by `make gpu`. Every claim was tried on this device.",
    ]
    if setting.is_tiny:
        lines.append("**The models were tiny: the figures of speed mean nothing.**")
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    lines += ["", f"{versions}, Python {sys.version.split()[0]}.", ""]
    lines += ["| claim | | figure |", "|---|---|---|"]
    for claims, _ in found.values():
        for claim in claims:
            figure = claim.figure.replace("|", "/")
            lines.append(f"| {claim.text} | {_HELD[claim.held]} | {figure} |")
    seconds = ", ".join(f"{check} {spent:.0f} s" for check, (_, spent) in found.items())
    return "\n".join([*lines, "", f"Time: {seconds}.", ""])


def main(arguments: list[str] | None = None) -> int:
    """Try the claims and write the page; return 1 if one of them did not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device is visible; `kvlab doctor` says why. On CPU: --device cpu --tiny")
        return 2
    setting = Setting(options.device, options.tiny)
    found = run_checks(setting, options.only)
    slug = re.sub(r"[^a-z0-9]+", "-", device_name(torch.device(setting.device)).lower()).strip("-")
    path = options.out or ROOT / "reports" / "gpu" / f"{slug}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(format_page(setting, found))
    print(path)
    return int(any(claim.held is False for claims, _ in found.values() for claim in claims))


if __name__ == "__main__":
    sys.exit(main())
