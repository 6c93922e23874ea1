"""Text from anywhere becomes printable, and nothing else of it changes."""

import pytest

from kvlab.humanize import sanitize_line, sanitize_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("as it is: é 日本 \N{MINUS SIGN}1\n\tnext", "as it is: é 日本 \N{MINUS SIGN}1\n\tnext"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\x00b", "a\\x00b"),
        ("half \ud800 of one", "half \\ud800 of one"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
    ],
)
def test_what_cannot_be_seen_is_shown_as_its_escape(text, shown):
    assert sanitize_text(text) == shown
    sanitize_text(text).encode()


def test_one_line():
    assert sanitize_line(" a\n\n b\tc\x07 ") == "a b c\\x07"
