"""Every line that refuses a wrong file or command, word for word: `golden_errors/errors.txt`.

Each block of that file is a mistake, after ``==``, and what standard error says of it. A mistake is
a command, or a change of ``e.yaml`` (``experiment: OLD ==> NEW``) or ``s.yaml`` (``sweep: OLD ==>
NEW``; ``sweep: + TEXT`` at its end), which `kvlab plan s.yaml` then reads. ``KVLAB_WRITE_GOLDEN=1``
writes the answers again, also those of new blocks, which need their first line alone.
"""

import os
import shlex
import shutil
from pathlib import Path

import pytest

from kvlab.cli.main import main
from kvlab.model import GPT
from kvlab.spec import ModelConfig
from tests.support.record_factory import Record
from tests.support.trained_trial import make_random_model, write_trained_trial

FOLDER = Path(__file__).parent / "golden_errors"
SHAPE = {"vocab_size": 257, "block_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with specs, a record, a trained trial and a checkpoint; and that trial."""
    folder = tmp_path_factory.mktemp("golden")
    for name in ("e.yaml", "s.yaml"):
        shutil.copy(FOLDER / name, folder)
    factors = {"heads": ("mha", "mqa"), "sharing": ("none", "tied")}
    Record(factors=factors, seeds=(0, 1)).write(folder / "runs")
    trial = write_trained_trial(folder / "trained", SHAPE, make_random_model(ModelConfig(**SHAPE)))
    GPT(ModelConfig(**{**SHAPE, "vocab_size": 41})).save_pretrained(folder / "weights")
    return folder, trial


def split(mistake, trial):
    """Return the files that a mistake changes, and the command that meets it."""
    kind, _, change = mistake.partition(": ")
    name = {"experiment": "e.yaml", "sweep": "s.yaml"}.get(kind)
    if name is None:
        return {}, [trial if word == "TRIAL" else word for word in shlex.split(mistake)[1:]]
    text = (FOLDER / name).read_text()
    old, arrow, new = change.encode().decode("unicode_escape").partition(" ==>")
    if not arrow:
        return {name: text + old.removeprefix("+ ") + "\n"}, ["plan", "s.yaml"]
    assert old in text, f"{mistake}: {name} has no such text"
    return {name: text.replace(old, new.removeprefix(" "), 1)}, ["plan", "s.yaml"]


def answer(folder, trial, mistake, capsys):
    """Return what a mistake prints, without the usage that argparse puts before it."""
    files, command = split(mistake, trial)
    for name in ("e.yaml", "s.yaml"):
        (folder / name).write_text(files.get(name, (FOLDER / name).read_text()))
    before = sorted(folder.rglob("*"))
    try:
        code = main(command)
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    assert code in (1, 2), f"{mistake}: exit code {code}\n{out}{err}"
    assert out == "", mistake
    assert sorted(folder.rglob("*")) == before, f"{mistake} wrote something"
    lines = err.replace(str(folder), "FOLDER").replace(trial, "TRIAL").splitlines()
    if lines[0].startswith("usage:"):
        lines = lines[-1:]
    return lines if code == 2 else [*lines, f"(exit code {code})"]


def test_every_error_is_worded_as_written(folder, capsys, monkeypatch):
    folder, trial = folder
    monkeypatch.chdir(folder)
    monkeypatch.setenv("KVLAB_DATA", str(folder / "data"))
    for name in ("KVLAB_STORE", "KVLAB_COPY_TO", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    path = FOLDER / "errors.txt"
    golden = path.read_text()
    mistakes = [line.removeprefix("== ") for line in golden.splitlines() if line[:3] == "== "]
    assert len(set(mistakes)) == len(mistakes), "a mistake stands there twice"
    said = "\n".join("\n".join([f"== {m}", *answer(folder, trial, m, capsys)]) for m in mistakes)
    if os.environ.get("KVLAB_WRITE_GOLDEN"):
        path.write_text(f"{said}\n")
        return
    assert f"{said}\n" == golden, "KVLAB_WRITE_GOLDEN=1 writes errors.txt again; review its diff"
