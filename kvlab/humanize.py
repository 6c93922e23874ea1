"""Text from anywhere, made printable: what is recorded may hold anything, the report must not."""

import re

# Control characters, direction overrides (text that reads otherwise than it is), half characters.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069"
    "\ufeff\ufffe\uffff\ud800-\udfff]"
)


def sanitize_text(text: str) -> str:
    """Invisible and harmful characters as their escapes, such as ``\\x1b``; the rest as it is."""
    return _HIDDEN.sub(_escape, text)


def sanitize_line(text: str) -> str:
    """`visible`, with every stretch of white space as one space."""
    return sanitize_text(" ".join(text.split()))


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
