"""`kvlab generate`: presets, checkpoints and trials, greedy and drawn, and what it refuses."""

import itertools
import json
import signal

import pytest

from kvlab.cli.main import main
from kvlab.data.tokenizers import load_tokenizer
from kvlab.humanize import sanitize_text
from kvlab.model import GPT
from kvlab.model.generate import generate, sample
from kvlab.spec import ModelConfig
from kvlab.spec.presets import PRESETS
from tests.support.trained_trial import make_random_model, make_tiny_experiment, write_trained_trial

SHAPE = {"vocab_size": 257, "block_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 16}
PROMPT = "ab ab"


@pytest.fixture(scope="module")
def model():
    return make_random_model(ModelConfig(**SHAPE)).eval()


@pytest.fixture
def trial(model, tmp_path, monkeypatch):
    """A store that holds one trained trial; gives its id."""
    monkeypatch.chdir(tmp_path)
    return write_trained_trial(tmp_path / "runs", SHAPE, model)


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A folder of GPT-2's type with a vocabulary that kvlab has no tokenizer for."""
    monkeypatch.chdir(tmp_path)
    shape = ModelConfig(**{**SHAPE, "vocab_size": 41})
    make_random_model(shape).save_pretrained(tmp_path / "weights")
    return str(tmp_path / "weights")


def run(capsys, *words):
    code = main(["generate", *words])
    out = capsys.readouterr()
    assert code == 0, out.err
    return out.out


def rows(capsys, *words):
    found = json.loads(run(capsys, *words, "--json"))["rows"]
    return [row["new_ids"] for row in found]


def refused(capsys, *words):
    code = main(["generate", *words])
    out = capsys.readouterr()
    assert (code, out.out) == (2, "")
    assert out.err.count("\n") <= 2, "a sentence, no traceback"
    return out.err


def test_a_trial_by_the_first_digits_of_its_id(trial, model, capsys):
    bytewise = load_tokenizer("bytes")
    expected = generate(model, [bytewise.encode(PROMPT)], 12, stop={bytewise.end_of_text})
    assert rows(capsys, trial[:5], "--prompt", PROMPT, "--new-tokens", "12") == expected


@pytest.mark.parametrize("how", [(), ("--temperature", "0.9", "--top-k", "30", "--top-p", "0.9")])
def test_cached_and_uncached_give_the_same_tokens(trial, capsys, how):
    words = (trial, "--prompt", PROMPT, "--prompt", "c", "--new-tokens", "20", *how)
    assert rows(capsys, *words) == rows(capsys, *words, "--uncached")
    lines = run(capsys, *words).splitlines()
    assert {"--- 0", "--- 1"} <= set(lines)


def test_a_row_ends_with_a_stop_token(trial, capsys):
    words = (trial, "--prompt-ids", "97,98", "--temperature", "1", "--seed", "3")
    free = rows(capsys, *words, "--new-tokens", "30")[0]
    stop = next(id for id in free if 32 < id < 127)
    ended = rows(capsys, *words, "--new-tokens", "30", "--stop", chr(stop))[0]
    assert ended == free[: free.index(stop) + 1]
    assert rows(capsys, *words, "--new-tokens", "30", "--seed", "4")[0] != free


def test_streamed_output_has_whole_characters_and_equals_the_json(trial, capsys):
    words = (trial, "--prompt", "z\u00fc", "--new-tokens", "24", "--temperature", "2")
    bytewise = load_tokenizer("bytes")
    new = rows(capsys, *words)[0]
    printed = run(capsys, *words)
    assert printed.startswith("z\u00fc")
    shown = sanitize_text("z\u00fc" + bytewise.decode(new))  # a terminal obeys control characters
    assert printed.removesuffix("\n") == shown


@pytest.mark.parametrize("change", ["kv_dtype=int8", "tie=adjacent:2"])
def test_serving_overrides_that_of_the_trial(trial, model, capsys, change):
    key, _, value = change.partition("=")
    serving = make_tiny_experiment(SHAPE, serving={key: value}).serving
    expected = generate(model, [[97, 98, 99, 100]], 40, serving=serving)
    words = (trial, "--prompt-ids", "97,98,99,100", "--new-tokens", "40")
    assert rows(capsys, *words, "--set", f"serving.{change}") == expected


def test_a_checkpoint_folder_takes_ids(checkpoint, capsys):
    model = GPT.from_pretrained(checkpoint).eval()
    words = (checkpoint, "--prompt-ids", "3,1,4", "--prompt-ids", "1", "--new-tokens", "9")
    assert rows(capsys, *words) == generate(model, [[3, 1, 4], [1]], 9)
    streamed = run(capsys, checkpoint, "--prompt-ids", "3,1,4", "--new-tokens", "9")
    ids = [3, 1, 4, *generate(model, [[3, 1, 4]], 9)[0]]
    assert streamed.strip() == ",".join(map(str, ids))


def test_a_preset_with_random_weights(monkeypatch, capsys):
    monkeypatch.setitem(PRESETS, "tiny", {**SHAPE, "vocab_size": 50257})
    words = ("tiny", "--random-weights", "--prompt-ids", "5,6", "--new-tokens", "6")
    expected = generate(GPT(ModelConfig(**PRESETS["tiny"])).eval(), [[5, 6]], 6, stop={50256})
    assert rows(capsys, *words) == expected


def test_the_cores_of_the_trial_are_the_threads(trial, capsys, monkeypatch):
    numbers = []
    monkeypatch.setattr("torch.set_num_threads", numbers.append)
    words = (trial, "--prompt", PROMPT, "--new-tokens", "2")
    run(capsys, *words)
    run(capsys, *words, "--threads", "3")
    assert numbers == [1, 3]


def test_text_beyond_the_block_is_warned_of(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shape = {**SHAPE, "block_size": 8, "position": "rope"}
    rotary = write_trained_trial(
        tmp_path / "runs", shape, make_random_model(ModelConfig(**shape)).eval()
    )
    words = ["generate", rotary, "--prompt-ids", "1,2,3", "--new-tokens"]
    assert main([*words, "5"]) == 0
    assert "warning" not in capsys.readouterr().err
    assert main([*words, "6"]) == 0
    assert "warning: 9 tokens with the prompt" in capsys.readouterr().err


BYTES = load_tokenizer("bytes")


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
    monkeypatch.setattr("kvlab.model.turns.sample", choose)
    code = main(["generate", target, "--chat", *words])
    out = capsys.readouterr()
    assert code == 0, out.err
    return out.out.removesuffix("\n").split("\n") if out.out else [], out.err


def continue_text(model, text, count):
    return generate(model, [text], count, stop={BYTES.end_of_text})[0]


def show(tokens):
    return sanitize_text(BYTES.decode(tokens))


def test_each_line_of_a_chat_goes_on_with_the_text(trial, model, monkeypatch, capsys):
    words = ("--prompt", "x", "--new-tokens", "5", "--show-reuse")
    replies, said = chat(monkeypatch, capsys, trial, ["ab", "c"], *words)
    first = BYTES.encode("xab\n")
    first += continue_text(model, first, 5)
    second = [*first, *BYTES.encode("c\n")]
    both = [show(first[4:]), show(continue_text(model, second, 5))]
    assert "\n".join(replies) == "\n".join(both)
    reused = [line.split(";")[0] for line in said.splitlines() if "took over" in line]
    bytes_each = 2 * 2 * 16 * 4
    assert reused == [
        "[took over 0 of 4 tokens (0 B)",
        f"[took over 9 of 11 tokens ({9 * bytes_each / 1024:.4g} KiB)",
    ]


def test_undo_and_new_leave_the_text_and_not_the_prefix_cache(trial, monkeypatch, capsys):
    lines = ["ab", "/undo", "ab", "/new", "ab", "/undo", "/undo", "/what"]
    replies, said = chat(monkeypatch, capsys, trial, lines, "--new-tokens", "4", "--show-reuse")
    assert len({*"\n".join(replies).split("\n")}) * 3 == len(replies), "thrice the same reply"
    assert [line.split()[2:5] for line in said.splitlines() if "took" in line] == [
        ["0", "of", "3"], ["2", "of", "3"], ["2", "of", "3"],
    ]  # fmt: skip
    assert "there is no turn to drop" in said
    assert "/what is no command; use /new or /undo" in said


def test_ctrl_c_stops_a_reply_and_the_chat_goes_on(trial, model, monkeypatch, capsys):
    text = BYTES.encode("ab\n")
    stopped = [*text, *continue_text(model, text, 3)]
    text = [*stopped, *BYTES.encode("c\n")]
    words = ("--new-tokens", "8", "--show-reuse")
    handler = signal.getsignal(signal.SIGINT)
    replies, said = chat(monkeypatch, capsys, trial, ["ab", "^C", "c"], *words, presses=(2,))
    both = [show(stopped[3:]), show(continue_text(model, text, 8))]
    assert "\n".join(replies) == "\n".join(both)
    assert "took over 6 of 8 tokens" in said
    assert "Ctrl-D ends the chat" in said
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_ctrl_c_drops_the_turn_and_the_chat_goes_on(trial, model, monkeypatch, capsys):
    text = BYTES.encode("ab\nd\n")
    words = ("--new-tokens", "8", "--prompt", "ab\n")
    replies, said = chat(monkeypatch, capsys, trial, ["c", "d"], *words, presses=(3, 3))
    kept = BYTES.encode("ab\nc\n")
    both = [show(continue_text(model, kept, 3)), show(continue_text(model, text, 8))]
    assert "\n".join(replies) == "\n".join(both)
    assert "the turn was dropped" in said


def test_a_chat_refuses_a_line_and_goes_on(checkpoint, monkeypatch, capsys):
    replies, said = chat(
        monkeypatch, capsys, checkpoint, ["x", "77", "1,2", ",".join("3" * 65)], "--new-tokens", "2"
    )
    model = GPT.from_pretrained(checkpoint).eval()
    assert replies == [",".join(map(str, generate(model, [[1, 2]], 2)[0]))]
    for message in ("x is not a list of token ids", "token id = 77 is not in the vocabulary",
                    "69 tokens exceed block_size = 64"):  # fmt: skip
        assert message in said
