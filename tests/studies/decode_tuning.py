"""The time of a compiled decode step by how Inductor tunes its kernels, on a GPU.

    python -m tests.studies decode_tuning [--tunings default pdl] [--layers 12] [--repeats 2]

Each tuning compiles a step of GPT-2 XL's width at batch 1 in a process of its own, with caches of
their own, and times it: what it finds is partly chance, and repeats show how much. Tunings take
turns. One line each time: milliseconds of a step, bytes of weights a second, the difference of the
logits from an eager step's over their norm, seconds of compiling.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from statistics import median

import torch
from torch import Tensor

from kvlab.benchmark.decode_timing import DecodeRun
from kvlab.model import GPT
from kvlab.model.generate import make_decoder, prefill
from kvlab.spec import ModelConfig, ServingConfig
from kvlab.spec.flops import matrix_weights

DIRECTIONS = {"TORCHINDUCTOR_COORDINATE_DESCENT_CHECK_ALL_DIRECTIONS": "1"}
TUNINGS: dict[str, dict[str, str]] = {
    "default": {},
    "starts": {"TORCHINDUCTOR_MAX_AUTOTUNE_POINTWISE": "1"},  # of several configurations
    "directions": DIRECTIONS,
    "radius": {**DIRECTIONS, "TORCHINDUCTOR_COORDINATE_DESCENT_RADIUS": "2"},
    "pdl": {"TORCHINDUCTOR_ENABLE_PDL": "1"},  # a kernel starts before the one ahead has ended
}
"""Name -> environment of the process that compiles."""

PROMPT, NEW = 512, 256


@torch.inference_mode()
def time_step(layers: int, device: str) -> dict[str, float]:
    """Return the best median of a step in milliseconds, and what else a line says."""
    is_cuda = device == "cuda"
    sizes = {"preset": "gpt2-xl"} if is_cuda else {"vocab_size": 300, "n_embd": 64, "n_head": 4}
    dtype = torch.bfloat16 if is_cuda else torch.float32
    torch.manual_seed(0)
    model = GPT(ModelConfig(**sizes, n_layer=layers), device=device, dtype=dtype).eval()
    compiled = ServingConfig(compile=True)
    run = DecodeRun(model, model.new_cache(1, PROMPT + NEW, compiled), NEW)
    seconds = min(median(run.time()["steps"]) for _ in range(4))
    logits = [_step_once(model, serving) for serving in (ServingConfig(), compiled)]
    weights = matrix_weights(model.config) * dtype.itemsize
    return {
        "milliseconds": 1e3 * seconds,
        "gigabytes_per_second": weights / seconds / 1e9,
        "difference": float((logits[1] - logits[0]).norm() / logits[0].norm()),
        "compiling": run.preparation,
    }


def _step_once(model: GPT, serving: ServingConfig) -> Tensor:
    cache = model.new_cache(1, PROMPT + NEW, serving)
    decoder = make_decoder(model, cache)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (1, PROMPT + 1), generator=generator)
    tokens = tokens.to(model.device)
    prefill(model, tokens[:, :PROMPT], cache)
    return decoder(tokens[:, PROMPT]).double()


def main() -> None:
    """Print a line for each tuning and repeat."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tunings", nargs="+", choices=list(TUNINGS), default=list(TUNINGS))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:  # in a process of its own
        print(json.dumps(time_step(options.layers, options.device)))
        return
    of = ["--layers", str(options.layers), "--device", options.device, "--one"]
    command = [sys.executable, "-m", "tests.studies", "decode_tuning", *of]
    for name in options.tunings * options.repeats:
        with tempfile.TemporaryDirectory() as folder:
            caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
            done = subprocess.run(
                command, env={**os.environ, **caches, **TUNINGS[name]},
                stdout=subprocess.PIPE, text=True, check=False,
            )  # fmt: skip
        lines = done.stdout.splitlines()
        found = json.loads(lines[-1]) if done.returncode == 0 else {"failed": done.returncode}
        print(f"{name:12}", *(f"{key} {value:.4g}" for key, value in found.items()), flush=True)
