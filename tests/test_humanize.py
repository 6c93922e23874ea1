"""Sizes, durations and counts as text; untrusted text without hidden characters."""

import pytest

from kvlab.humanize import (
    format_bytes,
    format_count,
    format_duration,
    format_number,
    redact_url,
    sanitize_line,
    sanitize_text,
)


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
def test_hidden_characters_are_escaped(text, shown):
    assert sanitize_text(text) == shown
    sanitize_text(text).encode()
    assert sanitize_line(" a\n\n b\tc\x07 ") == "a b c\\x07"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (185, "3m05s"), (3599.6, "1h00m"),
        (7620, "2h07m"), (86399.6, "1d00h"), (4 * 86400 + 3 * 3600, "4d03h"),
    ],
)  # fmt: skip
def test_durations(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(7, "7"), (999.4, "999"), (999.6, "1 k"), (62.5e9, "62.5 G"), (5e21, "5e+03 E")],
)
def test_decimal_prefixes(value, text):
    assert format_number(value) == text
    assert format_number(value, "B") == text + ("B" if " " in text else " B")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (1023, "1,023 B"), (1024, "1 KiB"), (114_688, "112 KiB"), (1536, "1.5 KiB"),
        (2**20 - 1, "1,024 KiB"), (75_497_472, "72 MiB"), (24 * 10**9, "22.35 GiB"), (2**60, "1,024 PiB"),
    ],
)  # fmt: skip
def test_sizes_have_binary_units(count, text):
    assert format_bytes(count) == text


def test_a_count_agrees_with_its_noun():
    counts = [format_count(n, "trial") for n in (0, 1, 2048)]
    assert counts == ["0 trials", "1 trial", "2,048 trials"]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://key:secret@bucket/a?token=x", "s3://bucket/a"),
        ("http://[::1:x@[/y", "http://[/y"),  # not a URL
        ("sqlite:////home/a@b/mlflow.db", "sqlite:////home/a@b/mlflow.db"),
        ("folder", "folder"),
    ],
)
def test_secrets_of_a_url_are_left_out(url, shown):
    assert redact_url(url) == shown
