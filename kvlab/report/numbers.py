"""Numbers as people read them: a true minus, fixed digits, bytes in MB (10^6) and MiB (2^20)."""

import math

from kvlab.trial.metrics import METRICS, Metric

MINUS = "\N{MINUS SIGN}"
TIMES = "\N{MULTIPLICATION SIGN}"
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"

_FIXED = {"nats/token": 4, "bits/byte": 4}
_SMALLEST = 1e-6
"""A difference of losses below it is rounding; above it, it is not shown as zero."""

_OTHER = Metric("", "")
_SHORT = {
    "loss": "one-shot loss",
    "loss_served": "served loss",
    "bits_per_byte": "one-shot bits/byte",
    "bits_per_byte_served": "served bits/byte",
}


def is_share(metric: str) -> bool:
    """Whether a metric is a share of items, which is shown in percent (differences in points)."""
    return metric.startswith(("hellaswag_", "recall_")) and not METRICS.get(metric, _OTHER).unit


def fixed(value: float, digits: int) -> str:
    """``value`` with a fixed number of decimals; one that rounds to zero has no sign."""
    text = f"{value:,.{digits}f}"
    if text.startswith("-"):
        text = text[1:] if not text.strip("-0.,") else MINUS + text[1:]
    return text


def signed(value: float, digits: int) -> str:
    """As `fixed`, always with a sign, except for zero."""
    text = fixed(value, digits)
    return text if text.startswith(MINUS) or not text.strip("0.,") else f"+{text}"


def significant(value: float, digits: int = 3) -> str:
    """``value`` with that many significant digits and no exponent below 10^15."""
    if value == 0:
        return "0"
    if not 1e-6 <= abs(value) < 1e15:
        return f"{value:.{digits - 1}e}".replace("-", MINUS)
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return fixed(round(value, decimals), max(0, decimals))


def shown(metric: str, value: float) -> str:
    """A metric's value without its unit."""
    if is_share(metric):
        return fixed(100 * value, 2)
    unit = METRICS.get(metric, _OTHER).unit
    if unit in _FIXED:
        return fixed(value, _FIXED[unit])
    return f"{value:,.0f}" if unit in ("bytes", "tokens", "items") else significant(value)


def difference(metric: str, value: float) -> str:
    """A difference of two values of a metric, without its unit, with a sign."""
    if is_share(metric):
        return signed(100 * value, 2)
    unit = METRICS.get(metric, _OTHER).unit
    if unit in _FIXED and not _SMALLEST <= abs(value) < 0.5 * 10.0 ** -_FIXED[unit]:
        return signed(value, _FIXED[unit])
    text = significant(value, 2 if unit in _FIXED else 3)
    return text if text.startswith(MINUS) or value == 0 else f"+{text}"


def in_unit(metric: str, value: float) -> float:
    """A value, or a difference of two, in the unit of `unit_of`: shares in percent."""
    return 100 * value if is_share(metric) else value


def distance(metric: str, value: float) -> str:
    """The size of a difference, without a sign."""
    return difference(metric, value).lstrip(f"+{MINUS}")


def unit_of(metric: str) -> str:
    """The unit that stands behind `shown`."""
    return "%" if is_share(metric) else METRICS.get(metric, _OTHER).unit


def difference_unit(metric: str) -> str:
    """The unit that stands behind `difference`: percent differ by points."""
    return "points" if is_share(metric) else METRICS.get(metric, _OTHER).unit


def p_value(value: float) -> str:
    return "<0.001" if value < 0.001 else fixed(value, 3)


def short(metric: str) -> str:
    """What a metric is called where there is little room."""
    return _SHORT.get(metric, METRICS.get(metric, _OTHER).title)


def megabytes(count: float) -> str:
    """In units of 10^6 bytes."""
    return _trimmed(significant(count / 10**6, 4))


def mebibytes(count: float) -> str:
    """In units of 2^20 bytes."""
    return _trimmed(significant(count / 2**20, 4))


def _trimmed(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def bytes_text(count: int) -> str:
    """Exactly, and in both units, since articles mix the two."""
    return f"{count:,} bytes ({megabytes(count)} MB, {mebibytes(count)} MiB)"


def times(ratio: float) -> str:
    return f"{significant(ratio)}{TIMES}"


def percent(share: float, digits: int = 1) -> str:
    return f"{fixed(100 * share, digits)}%"


def counted(number: int, noun: str) -> str:
    """``1 trial``, ``2 trials``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
