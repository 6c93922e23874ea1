"""HellaSwag item by item against lm-eval with `transformers`, on the same weights."""

import pytest
import torch

from kvlab.data.tokenizers import load_tokenizer
from kvlab.evaluate.hellaswag import score_hellaswag
from kvlab.extensions.lm_eval.harness import harness_model
from kvlab.model import GPT
from kvlab.spec import ModelConfig, ServingConfig
from kvlab.trial.model_targets import OpenedModel
from tests.extensions.lm_eval import reference
from tests.performance.decode_speed import transformers_model
from tests.support.extensions import needs
from tests.support.hellaswag_items import ITEMS

pytestmark = needs("published_weights")
huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="lm-eval itself")


@pytest.fixture(scope="module")
def model():
    """Weights so large that endings differ by nats and not by rounding."""
    shape = {"vocab_size": 50304, "block_size": 256, "n_layer": 2, "n_head": 2, "n_embd": 32}
    made = GPT(ModelConfig(**shape), seed=3).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return made


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("datasets")
        patch.setattr("datasets.config.HF_DATASETS_CACHE", folder)  # read at import, so not by env
        yield reference.hellaswag_task(folder / "items.jsonl", ITEMS)


@pytest.mark.filterwarnings("ignore")
def test_our_evaluation_and_our_model_inside_lm_eval_predict_the_same(model, task):
    words = reference.gpt2_words()
    lm = huggingface.HFLM(pretrained=transformers_model(model), tokenizer=words, batch_size=4)
    theirs = reference.samples(lm, task)
    predictions = [reference.prediction(sample) for sample in theirs]
    assert len(set(predictions)) > 2, "not all alike"
    records = score_hellaswag(model, ITEMS, load_tokenizer("gpt2"))
    scored = [record["lmeval"]["one_shot"] for record in records]
    scores = {"ours": [one["scores"] for one in scored]}
    assert [(one["prediction"], one["prediction_norm"]) for one in scored] == predictions
    for served in (False, True):
        opened = OpenedModel("made", model, ServingConfig(), "gpt2")
        ours = reference.samples(harness_model(opened, served=served), task)
        scores[served] = [reference.scores(sample) for sample in ours]
        assert [reference.prediction(sample) for sample in ours] == predictions
    for found in scores.values():
        for one, sample in zip(found, theirs, strict=True):
            assert one == pytest.approx(reference.scores(sample), abs=2e-3)
