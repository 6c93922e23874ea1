"""What every published architecture must do. A member's tests inherit `HFArchitectureContract`."""

import json
from abc import ABC, abstractmethod

import pytest
import torch

from kvlab.errors import PretrainedError
from kvlab.extensions.published_weights.pretrained import ARCHITECTURES
from kvlab.model import GPT

TOKENS = 40


class HFArchitectureContract(ABC):
    """Give `model_type`, a name in `ARCHITECTURES`, and models of `transformers`."""

    model_type: str
    rounding: float = 0.0
    """How far logits of a checkpoint that was read and written may be off."""
    unsupported: tuple = ()
    """(changes to ``config.json``, message) of what our model cannot compute."""

    @abstractmethod
    def reference_models(self):
        """Yield models of `transformers`: 90 tokens of vocabulary, 40 or more positions."""

    def test_a_checkpoint_there_and_back_with_every_parameter_mapped_once(self, tmp_path):
        for index, theirs in enumerate(self.reference_models()):
            folder, text = tmp_path / str(index), torch.arange(TOKENS)[None]
            _randomize(theirs)
            theirs.save_pretrained(folder / "theirs")
            ours = GPT.from_pretrained(folder / "theirs")
            names = [m.name for m in ARCHITECTURES[self.model_type].iter_weights(ours.config)]
            assert sorted(names) == sorted(name for name, _ in ours.named_parameters())
            _compare_logits(theirs, ours)
            assert ours.save_pretrained(folder / "ours") == self.model_type
            again = type(theirs).from_pretrained(folder / "ours").eval()
            with torch.inference_mode():
                error = (again(text).logits - theirs(text).logits).abs().max()
            assert error <= self.rounding

    def test_a_missing_tensor_is_named(self, tmp_path):
        from safetensors.torch import load_file, save_file

        theirs = next(iter(self.reference_models()))
        theirs.save_pretrained(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        gone = sorted(tensors)[-1]
        del tensors[gone]
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(PretrainedError, match=f"{gone} is missing"):
            GPT.from_pretrained(tmp_path)

    def test_what_our_model_cannot_compute_is_refused(self, tmp_path):
        next(iter(self.reference_models())).save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        for changes, message in self.unsupported:
            (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
            with pytest.raises(PretrainedError, match=message):
                GPT.from_pretrained(tmp_path)


def _randomize(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


def _compare_logits(theirs, ours):
    """One-shot and token by token."""
    theirs.eval()
    torch.manual_seed(1)
    text = torch.randint(0, 90, (2, TOKENS))
    with torch.inference_mode():
        expected = theirs(text).logits
        assert (ours(text) - expected).abs().max() < 1e-4
        cache = ours.new_cache(2, TOKENS)
        steps = [ours(text[:, i : i + 1], cache=cache) for i in range(TOKENS)]
        assert (torch.cat(steps, 1) - expected).abs().max() < 1e-4
