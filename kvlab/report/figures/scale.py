"""Scales and ticks: data units to pixels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.report.figures.plot import Axis
from kvlab.report.formatting import format_fixed, format_mebibytes, format_megabytes


@dataclass(frozen=True)
class Tick:
    """``lines`` are the label, one line of text each."""

    value: float
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Scale:
    """Maps ``low..high`` (in data units, base-2 logarithms for bytes) to ``start..end`` pixels."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool
    ticks: tuple[Tick, ...]

    def __call__(self, value: float) -> float:
        place = math.log2(value) if self.logarithmic else value
        share = (place - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def make_scale(axis: Axis, values: Sequence[float], start: float, end: float) -> Scale:
    """A scale that shows all ``values`` with some air, and round ticks that fit its length."""
    length = abs(end - start)
    if axis.kind == "names":
        ticks = tuple(Tick(index, (name,)) for index, name in enumerate(axis.names))
        return Scale(-0.6, len(axis.names) - 0.4, start, end, False, ticks)
    if axis.kind == "bytes":
        return _bytes_scale(values, start, end, max(2, int(length / 78)))
    low, high = min(values, default=0.0), max(values, default=1.0)
    spread = (high - low) or abs(high) or 1.0
    low, high = low - 0.05 * spread, high + 0.05 * spread
    room = 62 if end > start else 44  # labels side by side, or above each other
    ticks = _round_ticks(low, high, max(2, int(length / room)))
    return Scale(low, high, start, end, False, ticks)


def _round_ticks(low: float, high: float, wanted: int) -> tuple[Tick, ...]:
    """At multiples of 1, 2 or 5 times a power of ten, at most ``wanted`` of them."""
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= raw)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(Tick(k * step, (format_fixed(k * step, digits),)) for k in range(first, last + 1))


def _bytes_scale(values: Sequence[float], start: float, end: float, wanted: int) -> Scale:
    """Base-2 logarithms, ticks at powers of two, in binary units and below that in decimal ones."""
    low = math.log2(min(values, default=1.0)) - 0.35
    high = math.log2(max(values, default=1.0)) + 0.35
    first, last = math.ceil(low), math.floor(high)
    step = max(1, math.ceil((last - first + 1) / wanted))
    ticks = tuple(
        Tick(2.0**power, (_binary(power), _decimal(2**power)))
        for power in range(first, last + 1)
        if (last - power) % step == 0
    )
    return Scale(low, high, start, end, True, ticks)


def _binary(power: int) -> str:
    """A power of two in MiB, or in the unit in which it has four digits at most."""
    for unit, name in ((20, "MiB"), (30, "GiB")):
        if power < unit + 10:
            return f"{format_mebibytes(2.0 ** (power - unit + 20))} {name}"
    return f"{format_mebibytes(2.0 ** (power - 20))} TiB"


def _decimal(count: int) -> str:
    """Bytes in MB, or in the unit in which they have four digits at most."""
    for unit, name in ((10**6, "MB"), (10**9, "GB")):
        if count < 1000 * unit:
            return f"{format_megabytes(count / unit * 10**6)} {name}"
    return f"{format_megabytes(count / 10**6)} TB"
