"""A few hundred mutated specs; `python -m tests.fuzz_specs` runs any number."""

from tests.fuzz_specs import check, files


def test_mutated_specs_end_with_a_plan_or_a_refusal(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    folder = tmp_path / "specs"
    folder.mkdir()
    (folder / "text.txt").write_text("some text\n" * 100)
    problems = {number: check(number, folder) for number in range(300)}
    assert {number: text for number, text in problems.items() if text} == {}


def test_a_case_follows_from_its_number_and_cases_differ():
    assert files(7) == files(7)
    assert len({files(number)["s.yaml"] for number in range(50)}) > 25
