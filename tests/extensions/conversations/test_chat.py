"""`kvlab generate --chat`."""

import itertools
import signal

import pytest

from kvlab.cli.main import main
from kvlab.humanize import sanitize_text
from kvlab.model import GPT
from kvlab.model.generate import generate, sample
from tests.support.extensions import needs
from tests.support.generated import BYTES

pytestmark = needs("generate")


def chat(monkeypatch, capsys, target, lines, *words, presses=()):
    """Type ``lines``, and Ctrl-C while the tokens of the given numbers are chosen.

    Returns:
        The replies, and what was said on the standard error.
    """
    typed = iter([*lines, ""])

    class Keyboard:
        def isatty(self):
            return False

        def readline(self):
            line = next(typed)
            if line == "^C":
                raise KeyboardInterrupt
            return line and line + "\n"

    chosen = itertools.count()

    def choose(*arguments):
        number = next(chosen)
        for _ in range(presses.count(number)):
            signal.raise_signal(signal.SIGINT)
        return sample(*arguments)

    monkeypatch.setattr("sys.stdin", Keyboard())
    monkeypatch.setattr("kvlab.extensions.conversations.turns.sample", choose)
    code = main(["generate", target, "--chat", *words])
    out = capsys.readouterr()
    assert code == 0, out.err
    return out.out.removesuffix("\n"), out.err


def reply(model, text, count):
    """Return the tokens that go on with a text, and how a terminal shows them."""
    new = generate(model, [text], count, stop={BYTES.end_of_text})[0]
    return new, sanitize_text(BYTES.decode(new))


def test_each_line_of_a_chat_goes_on_with_the_text(trial, model, monkeypatch, capsys):
    words = ("--prompt", "x", "--new-tokens", "5", "--show-reuse")
    replies, said = chat(monkeypatch, capsys, trial, ["ab", "c"], *words)
    text = BYTES.encode("xab\n")
    new, first = reply(model, text, 5)
    _, second = reply(model, [*text, *new, *BYTES.encode("c\n")], 5)
    assert replies == f"{first}\n{second}"
    reused = [line.split(";")[0] for line in said.splitlines() if "took over" in line]
    size = 9 * 2 * 2 * 16 * 4
    assert reused == [
        "[took over 0 of 4 tokens (0 B)", f"[took over 9 of 11 tokens ({size / 1024:.4g} KiB)",
    ]  # fmt: skip


def test_undo_and_new_leave_the_text_and_not_the_prefix_cache(trial, monkeypatch, capsys):
    lines = ["ab", "/undo", "ab", "/new", "ab", "/undo", "/undo", "/what"]
    replies, said = chat(monkeypatch, capsys, trial, lines, "--new-tokens", "4", "--show-reuse")
    parts = replies.split("\n")
    assert len({*parts}) * 3 == len(parts), "thrice the same reply"
    assert [line.split()[2:5] for line in said.splitlines() if "took" in line] == [
        ["0", "of", "3"], ["2", "of", "3"], ["2", "of", "3"],
    ]  # fmt: skip
    assert "there is no turn to drop" in said
    assert "/what is no command; use /new or /undo" in said


@pytest.mark.parametrize("presses", [(2,), (2, 2)])
def test_ctrl_c_stops_a_reply_a_second_drops_the_turn_and_the_chat_goes_on(
    trial, model, monkeypatch, capsys, presses
):
    handler, words = signal.getsignal(signal.SIGINT), ("--new-tokens", "8", "--show-reuse")
    lines = ["ab", "^C", "c"]
    replies, said = chat(monkeypatch, capsys, trial, lines, *words, presses=presses)
    text, is_kept = BYTES.encode("ab\n"), len(presses) == 1
    new, first = reply(model, text, 3 if is_kept else 2)
    _, second = reply(model, [*([*text, *new] if is_kept else []), *BYTES.encode("c\n")], 8)
    assert replies == f"{first}\n{second}"
    assert ("the turn was dropped" in said, "took over 6 of 8 tokens" in said) == (
        not is_kept, is_kept,
    )  # fmt: skip
    assert "Ctrl-D ends the chat" in said
    assert signal.getsignal(signal.SIGINT) is handler


@needs("published_weights")
def test_a_chat_refuses_a_line_and_goes_on(checkpoint, monkeypatch, capsys):
    lines = ["x", "77", "1,2", ",".join("3" * 65)]
    replies, said = chat(monkeypatch, capsys, checkpoint, lines, "--new-tokens", "2")
    model = GPT.from_pretrained(checkpoint).eval()
    assert replies == ",".join(map(str, generate(model, [[1, 2]], 2)[0]))
    for message in ("x is not a list of token ids", "token id = 77 is not in the vocabulary",
                    "69 tokens exceed block_size = 64"):  # fmt: skip
        assert message in said


def test_options_of_a_chat_need_one(trial, capsys):
    assert main(["generate", trial, "--prompt", "a", "--show-reuse"]) == 2
    assert "add --chat, or leave them out" in capsys.readouterr().err
