"""Text for people: sizes, durations and counts, and untrusted text without hidden characters."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

# Control characters, direction overrides (which display text in another order), surrogates.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069"
    "\ufeff\ufffe\uffff\ud800-\udfff]"
)


def sanitize_text(text: str) -> str:
    """Replace invisible and harmful characters by their escapes, such as ``\\x1b``."""
    return _HIDDEN.sub(_escape, text)


def sanitize_line(text: str) -> str:
    """Return `sanitize_text` of one line: each run of white space becomes one space."""
    return sanitize_text(" ".join(text.split()))


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def summarize_error(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def redact_url(url: str) -> str:
    """Return a URL without user, password and query, which may be secrets."""
    scheme, separator, rest = url.partition("?")[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"


def suggest_name(
    wrong: object, names: Iterable[str], otherwise: str | None = None, cutoff: float = 0.6
) -> str:
    """Return ``did you mean NAME?`` with the nearest of ``names``.

    If none is near: ``otherwise``, by default ``use`` and all names.
    """
    names = tuple(names)
    near = get_close_matches(str(wrong), names, 1, cutoff)
    if near:
        return f"did you mean {near[0]}?"
    return f"use {', '.join(names)}" if otherwise is None else otherwise


def format_number(number: float, unit: str = "") -> str:
    """Return ``number`` with three significant digits and a decimal prefix: ``62.5 GFLOP/s``."""
    value = float(number)
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5:
            digits = f"{value:.3g}"
            return f"{digits} {prefix}{unit}" if prefix or unit else digits
        value /= 1000
    return f"{value:.3g} E{unit}"


def format_bytes(count: float) -> str:
    """Return a size in the largest binary unit of which there is one: ``512 B``, ``24 KiB``."""
    for power, unit in ((50, "PiB"), (40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 2**power:
            return f"{count / 2**power:,.4g} {unit}"
    return f"{count:,.0f} B"


def format_duration(seconds: float) -> str:
    """Return a duration in two units at most: ``7s``, ``3m05s``, ``2h07m``, ``4d03h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 trial``, ``1,024 trials``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
