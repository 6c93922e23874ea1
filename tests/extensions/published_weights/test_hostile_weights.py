"""Folders of weights that mean harm: nothing in them runs, and no memory is taken for them."""

import json
import os
import pickle
import struct

import numpy as np
import pytest

from kvlab.errors import PretrainedError
from kvlab.extensions.published_weights import pretrained as pretrained_module
from kvlab.model import GPT
from kvlab.spec import ModelConfig

SHAPE = ModelConfig(vocab_size=17, block_size=8, n_layer=2, n_head=2, n_embd=8)
BIAS = "transformer.h.0.attn.c_attn.bias"


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    GPT(SHAPE).save_pretrained(folder)
    data = (folder / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    config = json.loads((folder / "config.json").read_text())
    return config, json.loads(data[8 : 8 + length]), data[8 + length :]


@pytest.fixture
def write(tmp_path, whole):
    """Write a checkpoint with other settings, header or data; return its folder."""

    def write(config=None, header=None, data=None):
        own_config, own_header, own_data = whole
        text = config if isinstance(config, str) else json.dumps({**own_config, **(config or {})})
        (tmp_path / "config.json").write_text(text)
        head = header if isinstance(header, bytes) else json.dumps(header or own_header).encode()
        content = struct.pack("<Q", len(head)) + head + (own_data if data is None else data)
        (tmp_path / "model.safetensors").write_bytes(content)
        return tmp_path

    return write


def test_pickles_are_named_and_never_opened(tmp_path, write):
    folder = write()
    with (folder / "pytorch_model.bin").open("wb") as file:
        pickle.dump(Bomb(tmp_path / "ran"), file)
    GPT.from_pretrained(folder)  # beside safetensors they do not matter
    (folder / "model.safetensors").unlink()
    with pytest.raises(PretrainedError, match=r"pytorch_model\.bin, which is not opened.*convert"):
        GPT.from_pretrained(folder)
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")  # a pickle in disguise
    with pytest.raises(PretrainedError, match="header too large"):
        GPT.from_pretrained(folder)
    assert not (tmp_path / "ran").exists()


def test_code_of_a_checkpoint_is_refused(tmp_path, write):
    folder = write({"auto_map": {"AutoModelForCausalLM": "evil.Model"}})
    (folder / "evil.py").write_text(f"import os; os.mkdir({str(tmp_path / 'ran')!r})")
    with pytest.raises(PretrainedError, match="auto_map names code .* never runs; remove auto_map"):
        GPT.from_pretrained(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vocab_size": 10**12}, r"8,000,000,001,824 parameters, 32,000,000,007,296 bytes"),
        ({"n_positions": 10**12}, r"bytes in float32, and the files hold 1,960 numbers"),
        ({"n_layer": 5000}, r"4,360,216 parameters"),
        ({"n_layer": 10**9}, "n_layer = 1000000000: .*10000"),
        ({"n_layer": "x"}, "n_layer = x: .*integer"),
        ({"n_embd": None, "n_inner": None}, "of another kind"),
        ({"model_type": ["gpt2"]}, "model_type"),
        ('{"model_type": "gpt2", "n_layer": 2, "n_layer": 3}', "a key twice"),
        ("[1]", "no object"),
        ('{"a": ' + "9" * 2_000_000 + "}", "larger than"),
    ],
)
def test_settings_are_checked_before_memory_is_taken(write, config, message):
    with pytest.raises(PretrainedError, match=message):
        GPT.from_pretrained(write(config))


def test_memory_that_is_not_there_is_refused(write, monkeypatch):
    monkeypatch.setattr(
        pretrained_module.psutil, "virtual_memory", lambda: type("M", (), {"available": 1000})
    )
    with pytest.raises(PretrainedError, match=r"7,840 bytes in float32, and 1,000 bytes .* free"):
        GPT.from_pretrained(write())


@pytest.mark.parametrize(
    "facts",
    [
        {"data_offsets": [0, 10**12]},
        {"data_offsets": [8, 104]},
        {"shape": [2**33, 2**33, 0]},
        {"dtype": "F16"},
        None,
    ],
)
def test_a_header_is_compared_with_the_file(write, whole, facts):
    _, header, data = whole
    folder = write(
        header={**header, BIAS: {**header[BIAS], **(facts or {})}},
        data=data if facts else data + b"\0" * 64,
    )
    with pytest.raises(PretrainedError, match=r"model\.safetensors cannot be read: .*header"):
        GPT.from_pretrained(folder)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, struct.pack("<Q", 10**12) + b"{}", struct.pack("<Q", 3) + b"[1]"]
)
def test_a_file_without_a_header_is_none(write, content):
    folder = write()
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(PretrainedError, match="cannot be read: .*header"):
        GPT.from_pretrained(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_is_no_file(write, name):
    folder = write()
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(PretrainedError, match="no regular file"):
        GPT.from_pretrained(folder)


def test_weights_that_are_not_finite_are_refused(write, whole):
    data = np.full(len(whole[2]) // 4, np.nan, np.float32).tobytes()
    with pytest.raises(PretrainedError, match=r"wte\.weight has numbers that are not finite"):
        GPT.from_pretrained(write(data=data))
