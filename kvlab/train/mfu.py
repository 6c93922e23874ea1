"""FLOPs per second of a training, and their share of what the device can do (MFU).

Model FLOPs utilization is that of the PaLM report (arXiv 2204.02311): the FLOPs that the model
needs, by `kvlab.spec.flops`, over what the device could do in the same time. The latter is the
maker's figure for a known device, or measured here.
"""

import time
from functools import lru_cache

import torch

from kvlab.spec.experiment import Experiment
from kvlab.spec.flops import training_flops_per_token

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
"""Dense bfloat16 FLOPs per second by the makers' data sheets, by exact device name. A laptop's
card, or a part of a card (MIG), has the name of a larger one within its own, and is measured."""

MATRIX_SIDE = {"cpu": 1024, "cuda": 8192}
_REPEATS = 5


def find_peak_flops(device: torch.device, precision: str) -> tuple[float, str]:
    """Return the peak FLOPs per second of ``device``, and whether it is stated or measured.

    Where the maker's figure is not known, it is the rate of a large product.
    """
    if device.type == "cuda":
        stated = DATASHEET_FLOPS.get(torch.cuda.get_device_name(device).strip())
        if stated is not None and precision == "bfloat16":
            return stated, "stated"
    dtype = getattr(torch, precision)
    return measure_matmul_flops(device, dtype, torch.get_num_threads()), "measured"


@lru_cache
@torch.no_grad()
def measure_matmul_flops(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    """Measure the FLOPs per second of the fastest of a few large matrix products.

    The operands are random, as in training: some devices run products of equal numbers faster.
    They come from a generator of their own, so that the state of the global one is unchanged.

    Args:
        threads: the current number of threads, for which the result is cached.
    """
    assert threads == torch.get_num_threads()
    size = MATRIX_SIDE.get(device.type, MATRIX_SIDE["cuda"])
    generator = torch.Generator(device).manual_seed(0)
    a, b = (
        torch.randn(size, size, generator=generator, device=device, dtype=dtype) for _ in range(2)
    )
    out = a @ b
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


class MfuMeter:
    """Converts the token rate of all workers into FLOPs per second and MFU.

    Attributes:
        peak, origin: of one worker's device, see `find_peak_flops`.
    """

    def __init__(self, experiment: Experiment, device: torch.device, workers: int):
        self.workers = workers
        self.peak, self.origin = find_peak_flops(device, experiment.training.precision)
        self._flops_per_token = training_flops_per_token(experiment.model)

    def rates(self, tokens_per_second: float) -> dict[str, float]:
        """Return FLOPs per second, and their share of the peak of all workers' devices."""
        flops = self._flops_per_token * tokens_per_second
        return {"flops_per_second": flops, "mfu": flops / (self.peak * self.workers)}
