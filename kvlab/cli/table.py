"""Tables and sizes as the terminal shows them."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], right: str = "") -> str:
    """Aligned columns, the first row as head; ``right`` holds an ``r`` for right-aligned ones."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    align = right.ljust(len(widths))

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(row, widths, align, strict=False)
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([line(rows[0]), line(["-" * w for w in widths]), *map(line, rows[1:])])


def exact_bytes(count: int) -> str:
    """Bytes exactly, in MB (10^6) and in MiB (2^20): articles mix the two."""
    return f"{count:,} bytes = {one_decimal(count / 10**6)} MB = {one_decimal(count / 2**20)} MiB"


def one_decimal(value: float) -> str:
    """One decimal, three below 10: 1,048,576 bytes are 1.049 MB, not 1.0."""
    return f"{value:,.3f}" if value < 10 else f"{value:,.1f}"


def short_bytes(count: int) -> str:
    """Bytes with three significant digits, in powers of 1,000."""
    return short_number(count, "B")


def short_number(count: float, unit: str = "") -> str:
    """A number with three significant digits and k, M, G, T, P or E."""
    value = float(count)
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5:
            digits = f"{value:.3g}"
            return f"{digits} {prefix}{unit}".strip() if prefix or unit else digits
        value /= 1000
    return f"{value:.3g} E{unit}"
