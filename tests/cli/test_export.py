"""`kvlab export`: what it writes, `transformers` and kvlab read; the rest is refused."""

import json

import pytest
import torch

from kvlab.cli.main import main
from kvlab.model import GPT
from kvlab.spec import ModelConfig
from tests.support.trained_trial import make_random_model, write_trained_trial

COMMON = {"vocab_size": 257, "block_size": 64, "n_layer": 2, "n_head": 4, "n_embd": 32}
MODERN = {
    **COMMON, "position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False,
    "n_kv_head": 2, "tie_embeddings": False,
}  # fmt: skip
SHAPES = {
    "gpt2": COMMON,
    "llama": MODERN,
    "mistral": {**MODERN, "window": 9, "attention_pattern": "L"},
}
TEXT = torch.arange(40)[None] * 5 % 257


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", SHAPES)
def test_transformers_reads_an_exported_model(kind, capsys):
    transformers = pytest.importorskip("transformers", reason="the independent implementation")
    model = make_random_model(ModelConfig(**SHAPES[kind]))
    trial = write_trained_trial("runs", SHAPES[kind], model)
    assert main(["export", trial[:6], "out/weights", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == {"trial": trial, "model_type": kind, "folder": "out/weights"}
    theirs = transformers.AutoModelForCausalLM.from_pretrained("out/weights").eval()
    with torch.inference_mode():
        ours = model(TEXT)
        assert (theirs(TEXT).logits - ours).abs().max() < 1e-4
        assert torch.equal(GPT.from_pretrained("out/weights")(TEXT), ours)
    # the tokenizer of bytes ends a text with 256; the defaults are 50256 for gpt2, 2 for llama
    assert (theirs.config.bos_token_id, theirs.config.eos_token_id) == (256, 256)
    assert theirs.generation_config.eos_token_id == 256


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kv_sharing": "adjacent:2"}, "kv_owners is not (0, 1)"),
        ({"n_kv_head": 1}, "n_kv_head is not 4"),
        ({"window": 8, "attention_pattern": "GL"}, "window is not None"),
    ],
)
def test_a_model_without_a_hugging_face_architecture_is_refused(tmp_path, capsys, change, why):
    shape = {**COMMON, **change}
    trial = write_trained_trial("runs", shape, make_random_model(ModelConfig(**shape)))
    assert main(["export", trial, "out"]) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_in_use_is_refused(tmp_path):
    trial = write_trained_trial("runs", COMMON, make_random_model(ModelConfig(**COMMON)))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("kept")
    assert main(["export", trial, "out"]) == 2
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine.txt"]
