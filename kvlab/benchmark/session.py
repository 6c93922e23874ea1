"""One benchmark run: the variants under comparison, the settings, and the timings they share."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from kvlab.benchmark.decode_timing import PREPARATION_NOTE, DecodeRun, time_uncached
from kvlab.benchmark.device_peaks import device_name, load_device_peaks, needed_cores
from kvlab.benchmark.interleaving import (
    InterleavedTimings,
    NoiseWatch,
    Work,
    open_device,
    run_interleaved,
)
from kvlab.benchmark.measurement import Measurement, StopRule
from kvlab.benchmark.timing_statistics import TimingSamples, compare_timings
from kvlab.layout import KVLayout
from kvlab.layout.roofline_model import DevicePeaks
from kvlab.model import GPT
from kvlab.spec import ServingConfig


@dataclass(frozen=True)
class Variant:
    """A model and how it is served.

    Attributes:
        tokenizer: its name; None if kvlab does not have the model's tokenizer.
    """

    name: str
    model: GPT
    serving: ServingConfig
    tokenizer: str | None = None

    @property
    def dtype(self) -> str:
        return self.model.dtype_name

    @property
    def layout(self) -> KVLayout:
        return KVLayout.of(self.model.config, self.serving)


@dataclass(frozen=True)
class BenchmarkSettings:
    """Parameters of a benchmark.

    Attributes:
        prompt_tokens, new_tokens: of throughput, memory and the task.
        contexts: prompt lengths at which latency is measured.
        batches: batch sizes at which throughput is measured, in ascending order.
        stop_rule: when a timing is precise enough.
        text: path of Moby Dick for the task. None: the task needs ``tokens``.
        tokens: token ids that the task reads instead of a text.
        options: measure -> keys of its own, or the bytes that it may use.
        held_out: token ids of held-out text; empty if there is none.
        settles_comparisons: whether a timing goes on until it is known which variants differ from
            the first one.
    """

    prompt_tokens: int
    new_tokens: int
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    stop_rule: StopRule
    text: Path | None = None
    tokens: Sequence[int] = ()
    settles_comparisons: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    held_out: Sequence[int] | NDArray[Any] = ()

    def run_fields(self, batch_size: int) -> dict[str, Any]:
        """Return the fields of a measurement of cached decoding at the benchmark's lengths."""
        return {
            "batch_size": batch_size,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "context_length": self.prompt_tokens + self.new_tokens,
            "cached": True,
        }


@dataclass
class Session:
    """The variants on one device, and timings that several measures share.

    Args:
        on_turn: gets a note after every turn. An exception that it raises ends the benchmark.
        on_notice: gets what the user should know, such as a measure that is left out.
        remeasure_peaks: measure the device's peaks again even if they are known.
    """

    variants: list[Variant]
    settings: BenchmarkSettings
    on_turn: Callable[[str], None] = lambda _note: None
    on_notice: Callable[[str], None] = lambda _text: None
    remeasure_peaks: bool = False

    activity: str = ""
    """What is being measured, for progress notes and out-of-memory errors."""

    device_peaks: dict[str, DevicePeaks] = field(default_factory=dict)
    """dtype -> peaks of the device, as far as they are loaded."""

    timings: list[InterleavedTimings] = field(default_factory=list)
    """What has been timed, to tell whether any of it was disturbed."""

    @cached_property
    def device(self) -> torch.device:
        return self.variants[0].model.device

    @cached_property
    def device_name(self) -> str:
        return device_name(self.device)

    @cached_property
    def nvml(self) -> Any:
        """This GPU's handle of NVML; None on CPU, or where NVML is not installed."""
        if self.device.type != "cuda":
            return None
        return open_device(f"GPU-{torch.cuda.get_device_properties(self.device).uuid}")

    def watch_noise(self) -> NoiseWatch:
        """Return a new watch for other load on what this session measures."""
        return NoiseWatch(self.nvml, needed_cores(self.device))

    def peaks(self, dtype: str) -> DevicePeaks:
        """Return the device's peaks, measured at the first call if they are not known yet."""
        if dtype not in self.device_peaks:
            self.on_turn("device peaks")
            self.device_peaks[dtype] = load_device_peaks(
                self.device, dtype, remeasure=self.remeasure_peaks, nvml=self.nvml
            )
        return self.device_peaks[dtype]

    @cached_property
    def latencies(self) -> dict[int, InterleavedTimings]:
        """Prompt length -> series ``first``, ``steps``, ``uncached`` of every variant at batch 1.

        ``uncached`` is one step without a cache in the middle of the new tokens. Its time grows
        with the context, so the middle one represents all.
        """

        def turn(run: DecodeRun) -> dict[str, list[float]]:
            cached = run.time()
            uncached = time_uncached(run.model, run.cache.max_length - run.new_tokens // 2)
            return {**cached, "uncached": [uncached]}

        timings = {}
        for length in self.settings.contexts:
            self.activity = f"prompt {length}"
            timings[length] = self.time_decoding(turn, 1, length, compared=("steps",))
        return timings

    @cached_property
    def throughputs(self) -> dict[int, InterleavedTimings]:
        """Batch size -> series ``steps`` of every variant at the benchmark's lengths."""
        timings = {}
        prompt = self.settings.prompt_tokens
        for batch in self.settings.batches:
            if batch == 1 and prompt in self.settings.contexts:
                timings[batch] = self.latencies[prompt]
            else:
                self.activity = f"batch {batch}"
                timings[batch] = self.time_decoding(
                    lambda run: {"steps": run.time()["steps"]}, batch, prompt
                )
        return timings

    def time_decoding(
        self,
        turn: Callable[[DecodeRun], Mapping[str, list[float]]],
        batch: int,
        prompt: int,
        compared: Collection[str] | None = None,
    ) -> InterleavedTimings:
        """Run ``turn`` of every variant by turns, each with its own cache and decode step.

        Args:
            batch, prompt: sequences, and tokens of each before the new ones.
        """
        count, runs = self.settings.new_tokens, {}
        for v in self.variants:
            cache = v.model.new_cache(batch, prompt + count, v.serving)
            runs[v.name] = DecodeRun(v.model, cache, count)
        works = {name: partial(turn, run) for name, run in runs.items()}
        timings = self.time_interleaved(works, compared)
        for name, run in runs.items():
            timings.preparations[name] = run.preparation
            timings.slots[name] = {"read_slots": run.read_slots, "used_slots": run.used_slots}
        return timings

    def time_interleaved(
        self, works: Mapping[str, Work], compared: Collection[str] | None = None
    ) -> InterleavedTimings:
        """Run one work per variant in turns, by the session's stop rule.

        Args:
            works: variant -> one turn of it.
            compared: the series whose comparisons must be settled. None: all.
        """
        on_turn = partial(self.on_turn, self.activity)
        compared = compared if self.settings.settles_comparisons else ()
        timings = run_interleaved(
            works, self.settings.stop_rule, on_turn, compared, self.watch_noise
        )
        self.timings.append(timings)
        return timings

    @property
    def disturbance(self) -> str:
        """What else used the machine during the first timing that was disturbed; may be empty."""
        return next((one.noise for one in self.timings if one.noise), "")

    def make_line(
        self, part: str, metric: str, variant: Variant, value: float | None, unit: str, **more: Any
    ) -> Measurement:
        """Return a measurement of one variant, with its device and dtypes filled in."""
        return Measurement(
            part=part,
            metric=metric,
            variant=variant.name,
            value=value,
            unit=unit,
            device=self.device_name,
            dtype=variant.dtype,
            kv_dtype=variant.layout.storage_dtype(variant.dtype),
            **more,
        )

    def preparation_lines(
        self, part: str, timings: InterleavedTimings, **fields: Any
    ) -> Iterator[Measurement]:
        """Yield the seconds in which the decode steps of a timing were prepared, if any were."""
        for variant in self.variants:
            if seconds := timings.preparations.get(variant.name):
                yield self.make_line(
                    part, "step_preparation", variant, seconds, "s", note=PREPARATION_NOTE, **fields
                )

    def reliability(
        self, timings: InterleavedTimings, samples: TimingSamples, variant: Variant
    ) -> dict[str, Any]:
        """Return the fields of a variant's measurement that state how reliable a time is, and
        which attention kernels ran in it."""
        error = samples.relative_error
        max_error = self.settings.stop_rule.relative_error
        notes = [timings.noise] if timings.noise else []
        if error > max_error:
            text = f"relative error {error:.0%}"
            text = text if error < 10 else "too few rounds to know the error"
            notes.append(f"{text} where {max_error:.0%} was wanted")
        return {
            "samples": samples.rounds.size,
            "rounds": len(samples.rounds),
            "relative_error": error if error < 10 else None,
            "attention": timings.kernels.get(variant.name),
            "noisy": bool(notes),
            "note": "; ".join(notes),
        }

    def compare_variants(
        self, part: str, metric: str, series: str, timings: InterleavedTimings, **fields: Any
    ) -> Iterator[Measurement]:
        """Yield the time of each further variant as a multiple of the first one's.

        Variants that were not timed, or in too few rounds, are left out.

        Args:
            series: the series of ``timings`` to compare.
            fields: fields of the lines, such as the batch size.
        """
        base, *variants = (v for v in self.variants if (v.name, series) in timings.samples)
        for variant in variants:
            comparison = compare_timings(
                timings.samples[variant.name, series], timings.samples[base.name, series]
            )
            if comparison is None:
                continue
            note = ""
            if comparison.verdict == "undecided":
                least = f"{comparison.min_detectable:.0%}"
                note = f"not told apart; {least} or more would have been found"
            yield self.make_line(
                part, metric, variant, comparison.ratio, "", against=base.name,
                low=comparison.low, high=comparison.high, verdict=comparison.verdict,
                least_found=comparison.min_detectable, note=note, **fields,
            )  # fmt: skip
