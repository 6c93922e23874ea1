"""What sections say of their methods, from ``texts.md``."""

import re
from functools import cache
from importlib.resources import files


@cache
def read_texts() -> dict[str, str]:
    """Return the paragraphs by their headings."""
    page = files("kvlab.report").joinpath("texts.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)$", page, flags=re.MULTILINE)[1:]
    return {
        name: " ".join(text.split()) for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


def fill(name: str, **fields: object) -> str:
    """Return a paragraph with its fields filled in."""
    return read_texts()[name].format(**fields)


def when(condition: object, name: str, **fields: object) -> str:
    """Return a space and a paragraph if a condition holds, else nothing."""
    return f" {fill(name, **fields)}" if condition else ""
