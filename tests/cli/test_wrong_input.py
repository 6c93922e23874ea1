"""Wrong input: one line with file, line and column, exit code 2, and nothing written."""

import os

import pytest

from kvlab.cli.main import main
from tests.support.tiny_sweep import EXPERIMENT, SWEEP

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{one}: &{one} [{', '.join([f'*{last}'] * 9)}]\n"
    for last, one in zip("abcdefgh", "bcdefghi", strict=True)
)

# name -> sweep, experiment, and the start and a part of the line that refuses
WRONG = {
    "misspelt key": (
        SWEEP, EXPERIMENT.replace("n_head", "n_haed"), "e.yaml:2:", "did you mean n_head?"
    ),
    "misspelt section": (
        SWEEP + "seedz: [0]\n", EXPERIMENT, "s.yaml:7:1: ", "did you mean seeds?"
    ),
    "misspelt key in a level": (
        SWEEP.replace("n_kv_head", "n_kv_haed"), EXPERIMENT, "s.yaml:6:11: ", "n_kv_head"
    ),
    "wrong type": (
        SWEEP, EXPERIMENT.replace("n_layer: 2", "n_layer: two"), "e.yaml:2:51: ", "n_layer"
    ),
    "wrong number": (
        SWEEP, EXPERIMENT.replace("n_layer: 2", "n_layer: 2.5"), "e.yaml:2:51: ", "2.5"
    ),
    "heads that do not divide": (
        SWEEP.replace("n_kv_head: 1", "n_kv_head: 3"), EXPERIMENT, "s.yaml:6:28: ", "use 1 or 2"
    ),
    "empty sweep": ("", EXPERIMENT, "s.yaml:1:1: ", "empty"),
    "empty experiment": (SWEEP, "", "e.yaml:1:1: ", "empty"),
    "bomb": (BOMB, EXPERIMENT, "s.yaml:", ""),
    "bomb in the experiment": (SWEEP, BOMB, "e.yaml:", ""),
    "no YAML": ("question: [\n", EXPERIMENT, "s.yaml:", ""),
    "a tag that makes objects": (
        "question: !!python/object/apply:os.system [touch owned]\n", EXPERIMENT, "s.yaml:1:11: ", ""
    ),
    "a name that is a path": (
        "name: ../../x\n" + SWEEP, EXPERIMENT, "s.yaml:1:7: ", "../../x"
    ),
    "an experiment's name that is a path": (
        SWEEP, EXPERIMENT.replace("name: tiny", "name: ../../x"), "e.yaml:1:7: ", "../../x"
    ),
    "a level that is a path": (
        SWEEP.replace("    mha", "    ../../x"), EXPERIMENT, "s.yaml:5:5: ", "../../x"
    ),
    "an experiment that is not there": (
        SWEEP.replace("e.yaml", "f.yaml"), EXPERIMENT, "s.yaml:2:13: ", "f.yaml"
    ),
    "a decided metric that is not measured": (
        SWEEP + "decide: {metric: los_served}\n", EXPERIMENT, "s.yaml:7:18: ",
        "decide.metric = los_served is not measured; did you mean loss_served?",
    ),
    "a decided metric without a better direction": (
        SWEEP + "decide: {metric: loss_tokens}\n", EXPERIMENT, "s.yaml:7:18: ", "no better direction"
    ),
    "a margin that no share can have": (
        SWEEP + "decide: {metric: hellaswag_acc_norm, margin: 2}\n", EXPERIMENT, "s.yaml:7:46: ",
        "decide.margin = 2 is not below 1",
    ),
    "a key written twice": (SWEEP + "question: Again?\n", EXPERIMENT, "s.yaml:7:1: ", "question"),
}  # fmt: skip


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


@pytest.mark.parametrize("command", ["plan", "submit"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_files_are_refused(folder, capsys, name, command):
    sweep, experiment, start, part = WRONG[name]
    (folder / "s.yaml").write_text(sweep)
    (folder / "e.yaml").write_text(experiment)
    line = refused([command, "s.yaml"], capsys, folder)
    assert line.startswith(start)
    assert part in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_file(folder, capsys):
    (folder / "s.yaml").write_text(SWEEP)
    (folder / "s.yaml").chmod(0)
    assert refused(["submit", "s.yaml"], capsys, folder).startswith("s.yaml")


@pytest.mark.parametrize("name", ["nosuch.yaml", "../../x", ".", "s.yaml/x"])
def test_a_file_that_cannot_be_opened(folder, capsys, name):
    (folder / "s.yaml").write_text(SWEEP)
    refused(["submit", name], capsys, folder)


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
