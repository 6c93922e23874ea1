"""Numbers as people read them: a true minus, fixed digits, bytes in MB (10^6) and MiB (2^20)."""

import math

from kvlab.store.metrics import METRICS, Metric

MINUS = "\N{MINUS SIGN}"
TIMES = "\N{MULTIPLICATION SIGN}"
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"

_DECIMALS = {"nats/token": 4, "bits/byte": 4}
_ROUNDING = 1e-6
"""A difference of losses below it is rounding; above it, it is not shown as zero."""

_UNKNOWN_METRIC = Metric("", "")
_SHORT_TITLES = {
    "loss": "one-shot loss",
    "loss_served": "served loss",
    "bits_per_byte": "one-shot bits/byte",
    "bits_per_byte_served": "served bits/byte",
}


def is_share(metric: str) -> bool:
    """Whether a metric is a share of items, which is shown in percent (differences in points)."""
    return (
        metric.startswith(("hellaswag_", "recall_"))
        and not METRICS.get(metric, _UNKNOWN_METRIC).unit
    )


def format_fixed(value: float, digits: int) -> str:
    """``value`` with a fixed number of decimals; one that rounds to zero has no sign."""
    text = f"{value:,.{digits}f}"
    if text.startswith("-"):
        text = text[1:] if not text.strip("-0.,") else MINUS + text[1:]
    return text


def format_signed(value: float, digits: int) -> str:
    """As `fixed`, always with a sign, except for zero."""
    text = format_fixed(value, digits)
    return text if text.startswith(MINUS) or not text.strip("0.,") else f"+{text}"


def format_significant(value: float, digits: int = 3) -> str:
    """``value`` with that many significant digits and no exponent below 10^15."""
    if value == 0:
        return "0"
    if not 1e-6 <= abs(value) < 1e15:
        return f"{value:.{digits - 1}e}".replace("-", MINUS)
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return format_fixed(round(value, decimals), max(0, decimals))


def format_metric(metric: str, value: float) -> str:
    """A metric's value without its unit."""
    if is_share(metric):
        return format_fixed(100 * value, 2)
    unit = METRICS.get(metric, _UNKNOWN_METRIC).unit
    if unit in _DECIMALS:
        return format_fixed(value, _DECIMALS[unit])
    return f"{value:,.0f}" if unit in ("bytes", "tokens", "items") else format_significant(value)


def format_difference(metric: str, value: float) -> str:
    """A difference of two values of a metric, without its unit, with a sign."""
    if is_share(metric):
        return format_signed(100 * value, 2)
    unit = METRICS.get(metric, _UNKNOWN_METRIC).unit
    if unit in _DECIMALS and not _ROUNDING <= abs(value) < 0.5 * 10.0 ** -_DECIMALS[unit]:
        return format_signed(value, _DECIMALS[unit])
    text = format_significant(value, 2 if unit in _DECIMALS else 3)
    return text if text.startswith(MINUS) or value == 0 else f"+{text}"


def in_display_unit(metric: str, value: float) -> float:
    """A value, or a difference of two, in the unit of `unit_of`: shares in percent."""
    return 100 * value if is_share(metric) else value


def format_magnitude(metric: str, value: float) -> str:
    """The size of a difference, without a sign."""
    return format_difference(metric, value).lstrip(f"+{MINUS}")


def display_unit(metric: str) -> str:
    """The unit that stands behind `shown`."""
    return "%" if is_share(metric) else METRICS.get(metric, _UNKNOWN_METRIC).unit


def difference_unit(metric: str) -> str:
    """The unit that stands behind `difference`: percent differ by points."""
    return "points" if is_share(metric) else METRICS.get(metric, _UNKNOWN_METRIC).unit


def format_p_value(value: float) -> str:
    return "<0.001" if value < 0.001 else format_fixed(value, 3)


def short_title(metric: str) -> str:
    """What a metric is called where there is little room."""
    return _SHORT_TITLES.get(metric, METRICS.get(metric, _UNKNOWN_METRIC).title)


def format_megabytes(count: float) -> str:
    """In units of 10^6 bytes."""
    return _strip_zeros(format_significant(count / 10**6, 4))


def format_mebibytes(count: float) -> str:
    """In units of 2^20 bytes."""
    return _strip_zeros(format_significant(count / 2**20, 4))


def _strip_zeros(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_bytes(count: int) -> str:
    """Exactly, and in both units, since articles mix the two."""
    return f"{count:,} bytes ({format_megabytes(count)} MB, {format_mebibytes(count)} MiB)"


def format_ratio(ratio: float) -> str:
    return f"{format_significant(ratio)}{TIMES}"


def format_percent(share: float, digits: int = 1) -> str:
    return f"{format_fixed(100 * share, digits)}%"


def counted(number: int, noun: str) -> str:
    """``1 trial``, ``2 trials``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
