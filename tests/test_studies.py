"""The studies are listed by their first line, and mutants are code that is a little different."""

import ast
from pathlib import Path

from tests.studies import __main__ as studies
from tests.studies.mutants import draw_mutants, mutate

SHARING = Path(__file__).parents[1] / "kvlab" / "sharing"


def test_every_study_is_listed_and_another_name_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["studies"])
    assert studies.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(studies.FILES)
    assert all(len(line.split()) > 3 for line in lines)
    monkeypatch.setattr("sys.argv", ["studies", "nosuch"])
    assert studies.main() == 2


def test_each_mutant_changes_one_place_and_follows_from_the_seed():
    mutants = draw_mutants(SHARING, 10**6, 0)
    assert len(set(mutants)) == len(mutants) > 50
    assert draw_mutants(SHARING, 5, 1) == draw_mutants(SHARING, 5, 1) != mutants[:5]
    codes = set()
    for path, site in mutants:
        tree = ast.parse(path.read_text())
        before = ast.unparse(tree)
        assert mutate(tree, site)
        code = ast.unparse(tree)
        compile(code, path, "exec")
        assert code != before
        codes.add((path, code))
    assert len(codes) == len(mutants), "no two are the same"
    assert mutate(ast.parse("x = y"), 0) is None
