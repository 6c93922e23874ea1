"""`kvlab export`: what it writes, `transformers` and kvlab read; the rest is refused."""

import json

import pytest
import torch

from kvlab.cli.main import main
from kvlab.model import GPT
from kvlab.spec import ModelConfig
from tests.support.trained_trial import make_random_model, write_trained_trial

COMMON = {"vocab_size": 257, "block_size": 64, "n_layer": 2, "n_head": 4, "n_embd": 32}
LLAMA = {
    **COMMON, "position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False,
    "n_kv_head": 2, "tie_embeddings": False,
}  # fmt: skip
TEXT = torch.arange(40)[None] * 5 % 257


@pytest.mark.parametrize(("kind", "shape"), [("gpt2", COMMON), ("llama", LLAMA)])
def test_transformers_reads_an_exported_model(kind, shape, tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers", reason="the independent implementation")
    monkeypatch.chdir(tmp_path)
    model = make_random_model(ModelConfig(**shape))
    trial = write_trained_trial("runs", shape, model)
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


def test_a_model_without_a_hugging_face_architecture_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shape = {**COMMON, "kv_sharing": "adjacent:2"}
    trial = write_trained_trial("runs", shape, make_random_model(ModelConfig(**shape)))
    assert main(["export", trial, "out"]) == 2
    assert "kv_owners is not (0, 1)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
