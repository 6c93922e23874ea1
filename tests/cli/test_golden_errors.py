"""What commands print, word for word: `golden_errors/errors.txt` and `golden_errors/answers.txt`.

Each block of these files is a command, after ``==``, and its output: of a wrong file or command in
`errors.txt`, of a right one in `answers.txt`. Extensions have files of their own beside their
tests, and several together that in `tests/extensions`. A mistake may also be a change of ``e.yaml``
(``experiment: OLD ==> NEW``), ``s.yaml`` (``sweep: OLD ==> NEW``; ``sweep: + TEXT`` at its end) or
``q.yaml`` (``search: OLD ==> NEW``), which `kvlab plan` then reads. ``KVLAB_WRITE_GOLDEN=1`` writes
the answers again, also those of new blocks, which need their first line alone.
"""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from kvlab.cli.main import main
from kvlab.model import GPT
from kvlab.spec import ModelConfig
from tests.support.extensions import find_missing, is_tried
from tests.support.golden import check_golden
from tests.support.record_factory import FACTORS, Record, ServedRecord
from tests.support.search_record import EVERY_OUTCOME
from tests.support.trained_trial import make_random_model, write_trained_trial

FOLDER = Path(__file__).parent / "golden_errors"
EXTENSIONS = Path(__file__).parents[1] / "extensions"
PAGES = [*FOLDER.glob("*.txt"), *EXTENSIONS.rglob("errors.txt"), *EXTENSIONS.glob("*/answers.txt")]
PAGES = [path for path in PAGES if is_tried(path.parent.name)]
FILES = ("e.yaml", "s.yaml", "q.yaml")
SHAPE = {"vocab_size": 257, "block_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 16}
HEADS = {"heads": ("mha", "mqa")}
WIDE = {name: FACTORS[name] for name in ("heads", "position", "sharing")}
HALF = {**HEADS, "position": ("learned", "rope"), "mlp": ("gelu", "swiglu")}


def is_in_other_half(levels):
    """Whether an even number of levels are not the baseline's: a fraction of the design."""
    return sum(levels[name] != own[0] for name, own in HALF.items()) % 2 == 1


def status_of_lost(levels, seed):
    """One training diverged, one failed, and one has not run."""
    if levels["heads"] == "mha" or levels["position"] == "learned":
        return "done"
    return {1: "diverged", 2: "failed", 3: "missing"}.get(seed, "done")


class Later(ServedRecord):
    """Made by other code on another text, with better heads, and an interaction with sharing."""

    def result(self, levels, seed, status):
        found = super().result(levels, seed, status)
        found["provenance"] |= {"commit": "f" * 40, "threads": 8}
        found["provenance"]["data"]["digest"] = "a" * 64
        return found

    def training(self, levels, seed):
        return super().training(levels, seed)[::-1]

    def loss(self, levels, seed):
        both = levels["heads"] == "mqa" and levels["sharing"] == "trained"
        return super().loss(levels, seed) - (0.5 if both else 0.0)

    def description(self, cells):
        found = super().description(cells)
        found["patches"]["heads"]["mqa"] = {"model.n_kv_head": 2}
        return found


class HexRecord(Record):
    """A level whose name is the beginning of an id, and another that begins several."""

    def trial(self, levels, seed):
        found = super().trial(levels, seed)
        if levels["heads"] == "mha":
            return f"4e3{seed}{found[4:]}"
        return f"c{found[1:]}"


class MoreOfTheBaseline(Record):
    """As `designs: {one_factor: 4, baseline: 12}`, with seeds that explain nothing."""

    def description(self, cells):
        found = super().description(cells)
        for cell in found["cells"]:
            if cell["levels"]["heads"] != "mha":
                cell["trials"] = {s: trial for s, trial in cell["trials"].items() if int(s) < 4}
        return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with specs, records, a trained trial and a checkpoint; and that trial."""
    folder = tmp_path_factory.mktemp("golden")
    for name in FILES:
        shutil.copy(FOLDER / name, folder)
    small, four = {**HEADS, "sharing": ("none", "tied")}, (0, 1, 2, 3)
    more = {"heads": ("mha", "gqa", "mqa", "one")}
    records = {
        "runs": Record(factors=small, seeds=(0, 1)),
        "searched": EVERY_OUTCOME,
        "hex": HexRecord(factors={"heads": ("mha", "4e30", "4e")}, seeds=(0, 1)),
        "wide": ServedRecord(factors=WIDE, seeds=four),
        "later": Later(factors=WIDE, seeds=(0, 1, 2), effects={"mqa": -0.1}),
        "half": Record(factors=HALF, seeds=four, exclude=is_in_other_half),
        "lost": Record(factors={**WIDE, "sharing": ("none",)}, seeds=four, status=status_of_lost),
        "more": MoreOfTheBaseline(factors=more, seeds=tuple(range(12)), seed_noise=0.0, noise=0.02),
    }
    for name, record in records.items():
        record.write(folder / name)
    trial = write_trained_trial(folder / "trained", SHAPE, make_random_model(ModelConfig(**SHAPE)))
    if not find_missing("published_weights"):
        GPT(ModelConfig(**{**SHAPE, "vocab_size": 41})).save_pretrained(folder / "weights")
    return folder, trial


def split(mistake, trial):
    """Return the files that a mistake changes, and the command that meets it."""
    kind, _, change = mistake.partition(": ")
    name = {"experiment": "e.yaml", "sweep": "s.yaml", "search": "q.yaml"}.get(kind)
    if name is None:
        return {}, [trial if word == "TRIAL" else word for word in shlex.split(mistake)[1:]]
    text = (FOLDER / name).read_text()
    old, arrow, new = change.encode().decode("unicode_escape").partition(" ==>")
    if not arrow:
        return {name: text + old.removeprefix("+ ") + "\n"}, ["plan", "s.yaml"]
    assert old in text, f"{mistake}: {name} has no such text"
    command = ["plan", "q.yaml" if kind == "search" else "s.yaml"]
    return {name: text.replace(old, new.removeprefix(" "), 1)}, command


def answer(folder, trial, mistake, capsys, *, is_wrong):
    """Return what a command prints, without the usage that argparse puts before an error."""
    files, command = split(mistake, trial)
    for name in FILES:
        (folder / name).write_text(files.get(name, (FOLDER / name).read_text()))
    before = sorted(folder.rglob("*"))
    try:
        code = main(command)
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    assert sorted(folder.rglob("*")) == before, f"{mistake} wrote something"
    said, other = (err, out) if is_wrong else (out, err)
    assert (bool(said), other) == (True, ""), f"{mistake}: exit code {code}\n{out}{err}"
    said = re.sub("[0-9a-f]{64}", "SHA256", said.replace(str(folder), "FOLDER"))
    lines = said.replace(trial, "TRIAL").splitlines()
    if lines[0].startswith("usage:"):
        lines = lines[-1:]
    return lines if code == (2 if is_wrong else 0) else [*lines, f"(exit code {code})"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_line_is_worded_as_written(path, folder, capsys, monkeypatch):
    folder, trial = folder
    monkeypatch.chdir(folder)
    monkeypatch.setenv("KVLAB_DATA", str(folder / "data"))
    is_wrong = path.stem == "errors"
    golden = path.read_text()
    commands = [line.removeprefix("== ") for line in golden.splitlines() if line[:3] == "== "]
    assert len(set(commands)) == len(commands), "a command stands there twice"
    blocks = ([f"== {c}", *answer(folder, trial, c, capsys, is_wrong=is_wrong)] for c in commands)
    said = "\n".join("\n".join(lines) for lines in blocks)
    check_golden(path, f"{said}\n", "KVLAB_WRITE_GOLDEN")
