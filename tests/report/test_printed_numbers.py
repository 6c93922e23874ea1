"""Numbers as they are printed: what is one, and which values print so."""

import pytest

from kvlab.report.printed_numbers import byte_texts, find_numbers, parse_number


@pytest.mark.parametrize(
    ("text", "digits", "unit", "value"),
    [
        ("4.312", "4.312", "", 4.312),
        ("-0.096", "-0.096", "", -0.096),
        ("\N{MINUS SIGN}0.096", "-0.096", "", -0.096),
        ("+0.0145 nats/token", "0.0145", "nats/token", 0.0145),
        ("15,360 B", "15360", "B", 15360.0),
        ("15 KiB", "15", "KiB", 15.0),
        ("1.63x", "1.63", "\N{MULTIPLICATION SIGN}", 1.63),
        ("50.18%", "50.18", "%", 50.18),
        ("<0.001", "0.001", "", 0.001),
        ("5.02e\N{MINUS SIGN}5", "5.02e-5", "", 5.02e-5),
    ],
)
def test_a_printed_number(text, digits, unit, value):
    number = parse_number(text)
    assert (number.text, number.unit, number.value) == (digits, unit, value)


@pytest.mark.parametrize("text", ["tied", "mqa+tied", "4e30a045", "1 apple", "1 2", "", "0c2b"])
def test_no_number(text):
    assert parse_number(text) is None


def test_numbers_in_a_sentence_are_not_parts_of_words():
    text = "seed-1 of 4e30a045 costs \N{MINUS SIGN}0.0373 to +0.0663 (2.00\N{MULTIPLICATION SIGN})"
    assert [number.text for number in find_numbers(text)] == ["-0.0373", "0.0663", "2.00"]


def test_values_round_to_a_number_in_its_unit():
    number = parse_number("15 KiB")
    assert number.is_rounded_from(15360, "bytes")
    assert not number.is_rounded_from(14000, "bytes")
    assert not number.is_rounded_from(15, "ms")
    assert parse_number("15").is_rounded_from(15360, "bytes"), "the unit was left out"
    assert parse_number("0.10").is_rounded_from(0.0995)
    assert not parse_number("0.100").is_rounded_from(0.0994)
    assert parse_number("2.44").is_in("2.44 \N{PLUS-MINUS SIGN} 0.01")
    assert not parse_number("2.4").is_in("2.44 \N{PLUS-MINUS SIGN} 0.01")
    assert not parse_number("-0.1").is_in("+0.1")
    assert "15 KiB" in byte_texts(15360)
