"""What a training made of its devices: FLOPs a second, and their share of what is possible.

Model FLOPs utilisation (MFU) is that of the PaLM report (arXiv 2204.02311): FLOPs that the model
needs, by `kvlab.layout.flops`, over what the device could do in that time. The latter is never
assumed: it is a maker's figure for a device that we know, or measured here.
"""

import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from kvlab.layout import training_flops
from kvlab.spec.experiment import Experiment

DATASHEET_FLOPS = {
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 836e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA GeForce RTX 4090": 165e12,
    "NVIDIA GeForce RTX 3090": 71e12,
}
"""Dense bfloat16 FLOPs a second by the makers' data sheets, by the device's exact name: a laptop's
card, or part of one (MIG), has the name of a larger one within its own and is measured."""

_MATRIX_SIDE = {"cpu": 1024, "cuda": 8192}
_REPEATS = 5


@dataclass(frozen=True)
class PeakFlops:
    """FLOPs a second that one device can do; ``origin`` is ``stated`` or ``measured``."""

    flops_per_second: float
    origin: str


def find_peak_flops(device: torch.device, precision: str) -> PeakFlops:
    """The stated peak of ``device`` where there is one, else the rate of a large product."""
    if device.type == "cuda":
        stated = DATASHEET_FLOPS.get(torch.cuda.get_device_name(device).strip())
        if stated is not None and precision == "bfloat16":
            return PeakFlops(stated, "stated")
    rate = measure_matmul_flops(device, getattr(torch, precision), torch.get_num_threads())
    return PeakFlops(rate, "measured")


@lru_cache
@torch.no_grad()
def measure_matmul_flops(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    """FLOPs a second of the fastest of a few large matrix products; once in a process for each.

    Of random numbers, as a training's: a device that saves power on equal operands runs them
    faster than any training. Drawn aside, so that nobody else's draws change.
    """
    assert threads == torch.get_num_threads()
    size = _MATRIX_SIDE.get(device.type, _MATRIX_SIDE["cuda"])
    draw = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, generator=draw, device=device, dtype=dtype) for _ in range(2))
    out = a @ b
    best = float("inf")
    for _ in range(_REPEATS):
        began = time.perf_counter()
        torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


class MfuMeter:
    """Turns tokens a second of all workers into FLOPs a second and MFU of each device."""

    def __init__(self, experiment: Experiment, device: torch.device, workers: int):
        self.workers = workers
        self.peak = find_peak_flops(device, experiment.training.precision)
        steps, tokens = experiment.training.steps, experiment.training.batch_tokens
        self._per_token = training_flops(experiment) / (steps * tokens) if steps else 0.0

    def flops_per_second(self, tokens_per_second: float) -> float:
        return self._per_token * tokens_per_second

    def mfu(self, tokens_per_second: float) -> float:
        """Share of the peak of the workers' devices, of which each has one."""
        possible = self.peak.flops_per_second * self.workers
        return self.flops_per_second(tokens_per_second) / possible

    def facts(self, tokens_per_second: float) -> dict[str, Any]:
        """The fields of `kvlab.train.training_record.TrainingRecord` that are accounts."""
        return {
            "workers": self.workers,
            "flops_per_second": self.flops_per_second(tokens_per_second),
            "mfu": self.mfu(tokens_per_second),
            "peak_flops_per_second": self.peak.flops_per_second,
            "peak_flops_origin": self.peak.origin,
        }
