"""Mutated specs; `python -m tests.fuzz_specs` runs any number."""

import re

import pytest

from tests.fuzz_specs import Place, check, files, problems, search


def test_mutated_specs_end_with_a_record_or_a_refusal():
    assert problems(range(300)) == {}


@pytest.mark.faults
def test_ten_thousand_mutated_specs():
    assert search(0, 10_000) == {}


def test_a_file_anywhere_but_in_the_store_is_seen(tmp_path):
    with Place(tmp_path).entered() as place:
        (place.store / "trials").mkdir(parents=True)
        assert place.stray(store=True) == []
        assert place.stray(store=False) == [str(place.store), str(place.store / "trials")]
        for name in ("home/.kvlab", "work/mlruns", "specs/s.yaml.tmp", "runs-2"):
            (place.root / name).touch()
            assert place.stray(store=True) == [str(place.root / name)]
            (place.root / name).unlink()


def test_a_refusal_that_says_not_where_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.fuzz_specs.WHERE", re.compile("nowhere"))
    with Place(tmp_path).entered() as place:
        found = [check(number, place) for number in range(5)]
    assert any(text and text.startswith("says not where") for text in found)


def test_a_case_follows_from_its_number_and_cases_differ():
    assert files(7) == files(7)
    assert len({files(number)["s.yaml"] for number in range(50)}) > 25
