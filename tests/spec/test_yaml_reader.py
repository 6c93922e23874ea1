"""YAML as plain data: numbers, locations, and everything that is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.errors import SpecError
from kvlab.spec.yaml_reader import MAX_BYTES, parse_yaml, read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [("10e9", 10e9), ("6e-4", 6e-4), ("1_000", 1000), ("-3", -3), ("1.5", 1.5), ("0.5e1", 5.0),
     ("no", "no"), ("on", "on"), ("12:30", "12:30"), ("0x10", "0x10"), ("true", True),
     ("null", None), ("~", None), ('"5"', "5"), ("1.2.3", "1.2.3"), ("GLLLLL", "GLLLLL"),
     ("2026-01-01", "2026-01-01")],
)  # fmt: skip
def test_scalars_follow_yaml_1_2(text, value):
    data = parse_yaml(f"key: {text}", "x.yaml").data
    assert data == {"key": value}
    assert type(data["key"]) is type(value)


def test_locations_are_kept():
    document = parse_yaml("a: 1\nb:\n  c: [1, {d: 2}]\n", "x.yaml")
    assert document.locations[("b", "c", 1, "d")] == (3, 14)
    assert document.key_locations[("b", "c")] == (3, 3)


def test_unreadable_files(tmp_path):
    for path, message in (
        (tmp_path / "missing.yaml", "cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
    ):
        with pytest.raises(SpecError, match=message):
            read_yaml(path)
    (tmp_path / "latin.yaml").write_bytes(b"a: 1\nb: \xe9\n")
    with pytest.raises(SpecError, match=r"latin.yaml:2:1: is not UTF-8"):
        read_yaml(tmp_path / "latin.yaml")
    (tmp_path / "large.yaml").write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(SpecError, match="larger than"):
        read_yaml(tmp_path / "large.yaml")


@settings(max_examples=50)
@given(st.text(max_size=200))
def test_any_text_is_read_or_refused_never_a_crash(text):
    try:
        parse_yaml(text, "x.yaml")
    except SpecError as error:
        assert error.problems
