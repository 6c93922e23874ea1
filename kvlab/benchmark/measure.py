"""The benchmark stage of a trial."""

from collections.abc import Callable
from typing import Any

import torch

from kvlab.benchmark.decode import Decoder
from kvlab.benchmark.memory import kv_measurements, peak_measurements
from kvlab.benchmark.speed import speed_measurements
from kvlab.model import GPT
from kvlab.spec.experiment import Experiment

OnProgress = Callable[[dict[str, Any]], None]


def benchmark(
    model: GPT,
    experiment: Experiment,
    *,
    device: str | torch.device = "cpu",
    on_progress: OnProgress | None = None,
) -> dict[str, float | int]:
    """Memory and speed of decoding, by the names of `kvlab.trial.metrics`.

    KV bytes are at batch 1 and the block size, peaks and latencies at batch 1 and the
    benchmark's lengths, ``tokens_per_second`` at the largest of its batch sizes. Timings mean
    something only if nothing else runs on the device meanwhile.

    Args:
        on_progress: gets ``stage`` and ``note`` after every run. What it raises ends it.

    Raises:
        MeasurementError: byte counts that must agree do not.
    """
    model = model.to(device).eval()
    config = experiment.benchmark
    decoder = Decoder(model, experiment.serving, config)

    def tick(note: str) -> Callable[[], None]:
        def call() -> None:
            if on_progress is not None:
                on_progress({"stage": "benchmark", "note": note})

        return call

    found = kv_measurements(model, experiment.serving)
    found |= speed_measurements(decoder, max(config.batch_sizes), config.repeats, tick("speed"))
    return found | peak_measurements(decoder, tick("memory"))
