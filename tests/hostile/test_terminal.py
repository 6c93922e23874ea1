"""Nothing that a record, a file or an argument says is obeyed by a terminal or a spreadsheet."""

import json
import sys

import pytest

from kvlab.cli.main import main
from kvlab.cli.terminal import ControlText, sanitize_output, show_status_line
from tests.support.record_factory import Record

EVIL = "\x1b]0;title\x07\x1b[31m\u202egnp\u2066\x9b2J\u200f"
HIDDEN = set("\x1b\x07\x9b\u202e\u2066\u200f")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A record whose every text moves the cursor."""
    folder = tmp_path_factory.mktemp("evil")
    record = Record(
        factors={"heads": ("mha", f"mqa{EVIL}")},
        question=EVIL,
        error=f"{EVIL}\nline",
        notes=(EVIL,),
        status=lambda _levels, seed: "failed" if seed == 1 else "done",
    )
    written = record.write(folder / "runs")
    trial = record.trial({"heads": "mha"}, 1)
    attempt = written.attempt_directory(trial, 1)
    attempt.mkdir(parents=True)
    (attempt / "log.txt").write_text(f"{EVIL}\n")
    (attempt / "traceback.txt").write_text(f"{EVIL}\n")
    (written.trial_directory(trial) / "progress.json").write_text(json.dumps({"stage": EVIL}))
    return folder / "runs", trial


@pytest.mark.parametrize(
    "words",
    [
        ["status", "made"], ["status"], ["logs", "TRIAL"], ["verify"],
        ["status", EVIL], ["plan", f"{EVIL}.yaml"], [EVIL], ["copy", "--to", f"nowhere{EVIL}://x"],
    ],
)  # fmt: skip
def test_no_command_prints_what_a_terminal_obeys(store, capsys, words):
    path, trial = store
    words = [trial if word == "TRIAL" else word for word in words]
    try:
        main([*words, "--store", str(path)])
    except SystemExit as error:
        assert error.code == 2
    shown = capsys.readouterr()
    assert not HIDDEN & set(shown.out + shown.err)
    assert shown.out + shown.err


def test_only_kvlabs_own_text_moves_the_cursor(capsys):
    with sanitize_output():
        sys.stdout.writelines(["a\x1b[2J\n", "b\tc\r\n"])
        show_status_line(f"1 of 2 {EVIL}")
        sys.stdout.write(ControlText("\x1b[K"))
    shown = capsys.readouterr()
    assert shown.out == "a\\x1b[2J\nb\tc\\x0d\n\x1b[K"
    assert shown.err.startswith("\r\x1b[K1 of 2 \\x1b]0")
    assert not HIDDEN & set(shown.err.removeprefix("\r\x1b[K"))
