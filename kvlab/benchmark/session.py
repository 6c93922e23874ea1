"""One benchmark: the variants that are compared, how, and what they share."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import psutil
import torch

from kvlab.benchmark.decode_timing import TimedDecoder
from kvlab.benchmark.device_peaks import device_name, load_device_peaks, remeasure_device_peaks
from kvlab.benchmark.interleaving import InterleavedTimings, Work, run_interleaved
from kvlab.benchmark.measurement import Measurement, PartName, StopRule
from kvlab.benchmark.nvml import Nvml
from kvlab.benchmark.timing_statistics import TimingSamples, compare_timings
from kvlab.cache import KVCache
from kvlab.errors import ResourceError
from kvlab.layout import KVLayout
from kvlab.layout.roofline_model import DevicePeaks
from kvlab.model import GPT
from kvlab.oom import classify_oom
from kvlab.spec import ServingConfig


@dataclass(frozen=True)
class Variant:
    """A model and how it is served; ``tokenizer`` is None where kvlab has none for it."""

    name: str
    model: GPT
    serving: ServingConfig
    tokenizer: str | None = None

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def layout(self) -> KVLayout:
        return KVLayout.of(self.model.config, self.serving)

    @property
    def decoder(self) -> TimedDecoder:
        return TimedDecoder(self.model, self.serving)


@dataclass(frozen=True)
class BenchmarkSettings:
    """What is measured.

    Attributes:
        prompt_tokens, new_tokens: of throughput, memory and the task.
        contexts: prompts at which latency is measured.
        batches: batch sizes of throughput.
        rule: when a time is known well enough.
        text: a file of Moby Dick for the task; None leaves the task out.
        memory: bytes that the batch limit may use; needed on CPU.
        tokens: what the task reads in place of a text.
    """

    prompt_tokens: int
    new_tokens: int
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    rule: StopRule
    text: Path | None = None
    memory: int | None = None
    tokens: Sequence[int] = ()


TimesByLength = dict[tuple[str, int], InterleavedTimings[str]]


@dataclass
class Session:
    """The variants on one device. Parts that need the same times share them.

    Args:
        on_tick: gets a note after every turn; what it raises ends the benchmark.
        say: gets what a person should know, such as a part that is left out.
    """

    variants: list[Variant]
    settings: BenchmarkSettings
    on_tick: Callable[[str], None] = lambda _note: None
    say: Callable[[str], None] = lambda _text: None
    fresh_ceilings: bool = False
    largest: dict[str, int] = field(default_factory=dict)
    """Variant -> the largest batch that fits, once the part ``limit`` has found it."""

    doing: str = ""
    """What is being measured, in words: named where it does not fit in memory."""

    _ceilings: dict[str, DevicePeaks] = field(default_factory=dict)
    _timed: list[InterleavedTimings[str]] = field(default_factory=list)

    @cached_property
    def device(self) -> torch.device:
        return self.variants[0].model.device

    @cached_property
    def device_name(self) -> str:
        return device_name(self.device)

    @cached_property
    def nvml(self) -> Nvml | None:
        """NVIDIA's library on this GPU; None on CPU, or where it is not installed."""
        if self.device.type != "cuda":
            return None
        return Nvml.open(f"GPU-{torch.cuda.get_device_properties(self.device).uuid}")

    def ceilings(self, dtype: str) -> DevicePeaks:
        """The device's ceilings, measured at the first call if they are not known yet."""
        if dtype not in self._ceilings:
            self.on_tick("ceilings")
            self._ceilings[dtype] = load_device_peaks(self.device, dtype, again=self.fresh_ceilings)
        return self._ceilings[dtype]

    def raise_ceilings(self, dtype: str) -> None:
        """Measures the ceilings again, since a step was faster than they allow."""
        self.on_tick("ceilings again")
        self._ceilings[dtype] = remeasure_device_peaks(self.ceilings(dtype), self.device)

    @cached_property
    def latencies(self) -> dict[int, InterleavedTimings[str]]:
        """Prompt length -> ``first``, ``steps`` and ``again`` of every variant at batch 1.

        ``again`` is one step without a cache in the middle of the new tokens: it grows with the
        context, so the middle one stands for all.
        """
        return {length: self._latency(length) for length in self.settings.contexts}

    def _latency(self, length: int) -> InterleavedTimings[str]:
        count = self.settings.new_tokens
        self.doing = f"prompt {length}"
        works = {}
        for variant in self.variants:
            cache = variant.decoder.new_cache(1, length + count)

            def turn(variant: Variant = variant, cache: KVCache = cache) -> dict[str, list[float]]:
                timing = variant.decoder.decode(cache, count)
                again = variant.decoder.decode_again(length + (count + 1) // 2)
                return {"first": [timing.first], "steps": timing.steps, "again": [again]}

            works[variant.name] = turn
        return self.take_turns(works, compared=("steps",))

    @cached_property
    def throughputs(self) -> dict[int, InterleavedTimings[str]]:
        """Batch size -> ``steps`` of every variant at the benchmark's lengths."""
        return {batch: self._throughput(batch) for batch in self.settings.batches}

    def _throughput(self, batch: int) -> InterleavedTimings[str]:
        prompt, count = self.settings.prompt_tokens, self.settings.new_tokens
        if batch == 1 and prompt in self.settings.contexts:
            return self.latencies[prompt]
        self.doing = f"batch {batch}"
        works = {}
        for variant in self.variants:
            cache = variant.decoder.new_cache(batch, prompt + count)

            def turn(variant: Variant = variant, cache: KVCache = cache) -> dict[str, list[float]]:
                return {"steps": variant.decoder.decode(cache, count).steps}

            works[variant.name] = turn
        return self.take_turns(works)

    def take_turns(
        self, works: Mapping[str, Work], compared: Collection[str] | None = None
    ) -> InterleavedTimings[str]:
        """Runs a work of each variant in turns, by the session's rule; ``doing`` names it.

        Args:
            compared: the series whose comparisons must be settled; None: all.
        """
        tick = partial(self.on_tick, self.doing)
        timed = run_interleaved(works, self.settings.rule, tick, compared, self.nvml)
        self._timed.append(timed)
        return timed

    @property
    def disturbed(self) -> bool:
        """Whether other processes used the machine's cores while something was timed."""
        return any(timed.noise.note for timed in self._timed)

    def line(
        self,
        part: PartName,
        metric: str,
        variant: Variant,
        value: float | int | None,
        unit: str,
        **more: Any,
    ) -> Measurement:
        """A measurement of one variant, with what is known of it anyway."""
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

    def trust(self, timed: InterleavedTimings[str], samples: TimingSamples) -> dict[str, Any]:
        """The fields that say how far a time can be trusted."""
        error = samples.relative_error
        wanted = self.settings.rule.relative_error
        notes = [timed.noise.note] if timed.noise.note else []
        if error > wanted:
            known = f"relative error {error:.0%}"
            known = known if error < 10 else "too few rounds to know the error"
            notes.append(f"{known} where {wanted:.0%} was wanted")
        return {
            "samples": samples.rounds.size,
            "rounds": len(samples.rounds),
            "relative_error": error if error < 10 else None,
            "noisy": bool(notes),
            "note": "; ".join(notes),
        }


# A variant beside the first one, as a line of the benchmark.


def compare_variants(
    session: Session,
    part: PartName,
    metric: str,
    series: str,
    timed: InterleavedTimings[str],
    **place: Any,
) -> Iterator[Measurement]:
    """How long each further variant takes as a multiple of the first; nothing of a variant that
    was not timed, or in too few rounds.

    Args:
        place: fields of the lines, such as the batch size.
    """
    base, *others = (v for v in session.variants if (v.name, series) in timed.samples)
    for variant in others:
        found = compare_timings(
            timed.samples[variant.name, series], timed.samples[base.name, series]
        )
        if found is None:
            continue
        note = ""
        if found.verdict == "undecided":
            note = f"not told apart; {found.least_found:.0%} or more would have been found"
        yield session.line(
            part,
            metric,
            variant,
            found.ratio,
            "",
            against=base.name,
            low=found.low,
            high=found.high,
            verdict=found.verdict,
            least_found=found.least_found,
            note=note,
            **place,
        )


# What libraries raise when memory is gone, as one error that names what was asked for.


@contextmanager
def explain_out_of_memory(session: Session) -> Iterator[None]:
    """Raises ResourceError where memory ran out, with what the session was doing."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not classify_oom(error):
            raise
        raise _does_not_fit_error(session, session.doing) from None


def check_caches_fit(session: Session) -> None:
    """Looks before a system that promises memory freely ends the process over it.

    Raises:
        ResourceError: the caches of a batch alone are more than the device has free.
    """
    free = _free_bytes(session.device)
    settings = session.settings
    length = settings.prompt_tokens + settings.new_tokens
    for batch in settings.batches:
        # all variants' caches are there at once, since they take turns
        needed = sum(
            each.layout.stored_bytes(batch, length, each.dtype) for each in session.variants
        )
        if needed > free:
            caches = f"its caches take {needed:,} bytes where {free:,} are free"
            raise _does_not_fit_error(session, f"batch {batch}", f": {caches}")


def _does_not_fit_error(session: Session, doing: str, why: str = "") -> ResourceError:
    way_out = "measure fewer variants, or a smaller model"
    if "batch" in doing:
        way_out = "use smaller --batches, or fewer variants at once; --only limit finds the largest"
    elif "prompt" in doing:
        way_out = "use shorter --contexts, or fewer variants at once"
    return ResourceError(f"{doing} does not fit on this {session.device.type}{why}; {way_out}")


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available + psutil.swap_memory().free)


# The contract of a benchmark's parts. The members are in ``parts/``, one file each.


Measure = Callable[[Session], Iterator[Measurement]]
"""Measures and yields lines. What it cannot measure here it tells through `Session.say`."""
