"""`kvlab export`, and `kvlab generate` of a checkpoint."""

import json

import pytest
import torch

from kvlab.cli.main import main
from kvlab.model import GPT
from kvlab.model.generate import generate
from kvlab.spec import ModelConfig
from tests.support.extensions import needs
from tests.support.generated import SHAPE, rows, run
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


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A folder of GPT-2's type with a vocabulary that kvlab has no tokenizer for."""
    monkeypatch.chdir(tmp_path)
    shape = ModelConfig(**{**SHAPE, "vocab_size": 41})
    make_random_model(shape).save_pretrained(tmp_path / "weights")
    return str(tmp_path / "weights")


@needs("generate")
def test_a_checkpoint_folder_takes_ids(checkpoint, capsys):
    model = GPT.from_pretrained(checkpoint).eval()
    words = (checkpoint, "--prompt-ids", "3,1,4", "--prompt-ids", "1", "--new-tokens", "9")
    assert rows(capsys, *words) == generate(model, [[3, 1, 4], [1]], 9)
    streamed = run(capsys, checkpoint, "--prompt-ids", "3,1,4", "--new-tokens", "9")
    assert streamed.strip() == ",".join(map(str, [3, 1, 4, *generate(model, [[3, 1, 4]], 9)[0]]))
