"""One benchmark: the variants that are compared, how, and what they share."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from kvlab.benchmark.ceilings import better_ceilings, ceilings, device_name
from kvlab.benchmark.decode import Decoder
from kvlab.benchmark.interleave import Timed, Work, interleave
from kvlab.benchmark.measurement import Measurement, PartName
from kvlab.benchmark.nvml import Nvml
from kvlab.benchmark.rule import StopRule
from kvlab.benchmark.samples import Samples
from kvlab.cache import KVCache
from kvlab.layout import KVLayout
from kvlab.layout.roofline import Ceilings
from kvlab.model import GPT
from kvlab.spec.parts import ServingConfig


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
    def decoder(self) -> Decoder:
        return Decoder(self.model, self.serving)


@dataclass(frozen=True)
class Settings:
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


Times = dict[tuple[str, int], Timed[str]]


@dataclass
class Session:
    """The variants on one device. Parts that need the same times share them.

    Args:
        on_tick: gets a note after every turn; what it raises ends the benchmark.
        say: gets what a person should know, such as a part that is left out.
    """

    variants: list[Variant]
    settings: Settings
    on_tick: Callable[[str], None] = lambda _note: None
    say: Callable[[str], None] = lambda _text: None
    fresh_ceilings: bool = False
    largest: dict[str, int] = field(default_factory=dict)
    """Variant -> the largest batch that fits, once the part ``limit`` has found it."""

    doing: str = ""
    """What is being measured, in words: named where it does not fit in memory."""

    _ceilings: dict[str, Ceilings] = field(default_factory=dict)
    _timed: list[Timed[str]] = field(default_factory=list)

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

    def ceilings(self, dtype: str) -> Ceilings:
        """The device's ceilings, measured at the first call if they are not known yet."""
        if dtype not in self._ceilings:
            self.on_tick("ceilings")
            self._ceilings[dtype] = ceilings(self.device, dtype, again=self.fresh_ceilings)
        return self._ceilings[dtype]

    def raise_ceilings(self, dtype: str) -> None:
        """Measures the ceilings again, since a step was faster than they allow."""
        self.on_tick("ceilings again")
        self._ceilings[dtype] = better_ceilings(self.ceilings(dtype), self.device)

    @cached_property
    def latencies(self) -> dict[int, Timed[str]]:
        """Prompt length -> ``first``, ``steps`` and ``again`` of every variant at batch 1.

        ``again`` is one step without a cache in the middle of the new tokens: it grows with the
        context, so the middle one stands for all.
        """
        return {length: self._latency(length) for length in self.settings.contexts}

    def _latency(self, length: int) -> Timed[str]:
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
    def throughputs(self) -> dict[int, Timed[str]]:
        """Batch size -> ``steps`` of every variant at the benchmark's lengths."""
        return {batch: self._throughput(batch) for batch in self.settings.batches}

    def _throughput(self, batch: int) -> Timed[str]:
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
    ) -> Timed[str]:
        """Runs a work of each variant in turns, by the session's rule; ``doing`` names it.

        Args:
            compared: the series whose comparisons must be settled; None: all.
        """
        tick = partial(self.on_tick, self.doing)
        timed = interleave(works, self.settings.rule, tick, compared, self.nvml)
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

    def trust(self, timed: Timed[str], samples: Samples) -> dict[str, Any]:
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
