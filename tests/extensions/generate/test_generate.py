"""`kvlab generate`: presets and trials."""

import pytest

from kvlab.cli.main import main
from kvlab.humanize import sanitize_text
from kvlab.model import GPT
from kvlab.model.generate import generate
from kvlab.spec import ModelConfig, ServingConfig
from kvlab.spec.presets import PRESETS
from tests.support.generated import BYTES, SHAPE, rows, run
from tests.support.trained_trial import make_random_model, write_trained_trial


@pytest.mark.parametrize("change", ["", "kv_dtype=int8", "tie=adjacent:2"])
def test_a_trial_by_its_first_digits_is_served_as_asked(trial, model, capsys, change):
    key, _, value = change.partition("=")
    serving = ServingConfig(**({key: value} if change else {}))
    text = BYTES.encode("abcd")
    expected = generate(model, [text], 40, serving=serving, stop={BYTES.end_of_text})
    words = (trial[:5], "--prompt", "abcd", "--new-tokens", "40")
    changes = ("--set", f"serving.{change}") if change else ()
    assert rows(capsys, *words, *changes) == expected


def test_rows_are_drawn_with_and_without_a_cache_until_a_stop_token(trial, capsys):
    words = (trial, "--prompt", "ab ab", "--prompt", "c", "--new-tokens", "30")
    words += ("--temperature", "1", "--top-k", "60", "--top-p", "0.95", "--seed")
    free = rows(capsys, *words, "3")
    assert rows(capsys, *words, "3", "--uncached") == free != rows(capsys, *words, "4")
    assert {"--- 0", "--- 1"} <= set(run(capsys, *words, "3").splitlines())
    stop = next(id for id in free[0] if 32 < id < 127)
    ended = rows(capsys, *words, "3", "--stop", chr(stop))[0]
    assert ended == free[0][: free[0].index(stop) + 1]


def test_streamed_output_has_whole_characters_and_equals_the_json(trial, capsys):
    words = (trial, "--prompt", "z\u00fc", "--new-tokens", "24", "--temperature", "2")
    new = rows(capsys, *words)[0]
    shown = sanitize_text("z\u00fc" + BYTES.decode(new))  # a terminal obeys control characters
    assert run(capsys, *words).removesuffix("\n") == shown


def test_a_preset_with_random_weights(monkeypatch, capsys):
    monkeypatch.setitem(PRESETS, "tiny", {**SHAPE, "vocab_size": 50257})
    words = ("tiny", "--random-weights", "--prompt-ids", "5,6", "--new-tokens", "6")
    expected = generate(GPT(ModelConfig(**PRESETS["tiny"])).eval(), [[5, 6]], 6, stop={50256})
    assert rows(capsys, *words) == expected


def test_running_out_of_memory_is_one_line(trial, monkeypatch, capsys):
    def run_out(*_args, **_keywords):
        raise RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        )

    monkeypatch.setattr("kvlab.model.generate.generate", run_out)
    assert main(["generate", trial, "--prompt", "a"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_the_cores_of_the_trial_are_the_threads_and_text_beyond_its_block_is_warned_of(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    shape, numbers = {**SHAPE, "block_size": 8, "position": "rope"}, []
    rotary = write_trained_trial("runs", shape, make_random_model(ModelConfig(**shape)).eval())
    monkeypatch.setattr("torch.set_num_threads", numbers.append)
    words = ["generate", rotary, "--prompt-ids", "1,2,3", "--new-tokens"]
    assert main([*words, "5"]) == 0
    assert "warning" not in capsys.readouterr().err
    assert main([*words, "6", "--threads", "3"]) == 0
    assert "warning: 9 tokens with the prompt" in capsys.readouterr().err
    assert numbers == [1, 3]
