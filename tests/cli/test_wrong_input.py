"""Files that cannot be read: one line, exit code 2, and nothing written. Wording: `golden_errors`."""

import os

import pytest

from kvlab.cli.main import main
from tests.support.tiny_sweep import EXPERIMENT, SWEEP

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{one}: &{one} [{', '.join([f'*{last}'] * 9)}]\n"
    for last, one in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("KVLAB_STORE", raising=False)
    return tmp_path


def refused(arguments, capsys, folder):
    before = sorted(folder.rglob("*"))
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1, printed.err
    assert sorted(folder.rglob("*")) == before, "something was written"
    return printed.err


@pytest.mark.parametrize("wrong", ["s.yaml", "e.yaml"])
def test_a_bomb_is_refused_where_it_is_written(folder, capsys, wrong):
    (folder / "s.yaml").write_text(SWEEP)
    (folder / "e.yaml").write_text(EXPERIMENT)
    (folder / wrong).write_text(BOMB)
    assert refused(["submit", "s.yaml"], capsys, folder).startswith(f"{wrong}:1:")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_file(folder, capsys):
    (folder / "s.yaml").write_text(SWEEP)
    (folder / "s.yaml").chmod(0)
    assert refused(["submit", "s.yaml"], capsys, folder).startswith("s.yaml")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"question: \x00\n", b"\x89PNG\r\n\x1a\n"])
def test_a_file_that_is_not_text(folder, capsys, content):
    (folder / "s.yaml").write_bytes(content)
    assert refused(["submit", "s.yaml"], capsys, folder).startswith("s.yaml")


def test_all_errors_are_shown_in_the_order_of_the_file(folder, capsys):
    (folder / "s.yaml").write_text(SWEEP)
    wrong = EXPERIMENT.replace("n_layer: 2", "n_layer: two").replace("repeats", "repeat")
    (folder / "e.yaml").write_text(wrong)
    assert main(["plan", "s.yaml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ")[0].split(":")[:2] for line in lines] == [
        ["e.yaml", "2"],
        ["e.yaml", "6"],
    ]


def test_a_store_that_is_a_file(folder, capsys):
    (folder / "runs").write_text("")
    (folder / "s.yaml").write_text(SWEEP)
    (folder / "e.yaml").write_text(EXPERIMENT)
    assert main(["plan", "s.yaml"]) == 1
    assert "--store" in capsys.readouterr().err
