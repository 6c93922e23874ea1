"""HellaSwag item by item against lm-eval with `transformers`, on the same weights."""

import pytest
import torch

from kvlab.data.tokenizers import load_tokenizer
from kvlab.evaluate.hellaswag import score_hellaswag
from kvlab.model import GPT
from kvlab.spec import ModelConfig, ServingConfig
from kvlab.trial.lm_eval_adapter import harness_model
from kvlab.trial.model_targets import OpenedModel
from tests.performance.decode_speed import transformers_model
from tests.support import lm_eval_reference
from tests.support.hellaswag_items import ITEMS

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
        yield lm_eval_reference.hellaswag_task(folder / "items.jsonl", ITEMS)


@pytest.fixture(scope="module")
def theirs(model, task):
    words = lm_eval_reference.gpt2_words()
    lm = huggingface.HFLM(pretrained=transformers_model(model), tokenizer=words, batch_size=4)
    return lm_eval_reference.samples(lm, task)


@pytest.mark.filterwarnings("ignore")
def test_our_evaluation_predicts_the_same(model, theirs):
    records = score_hellaswag(model, ITEMS, load_tokenizer("gpt2"), conventions=("lmeval",))
    for record, sample in zip(records, theirs, strict=True):
        scored = record["lmeval"]["one_shot"]
        assert scored["scores"] == pytest.approx(lm_eval_reference.scores(sample), abs=2e-3)
        assert (scored["prediction"], scored["prediction_norm"]) == lm_eval_reference.prediction(
            sample
        )
    assert len({lm_eval_reference.prediction(sample) for sample in theirs}) > 2, "not all alike"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("served", [False, True])
def test_our_model_inside_lm_eval_predicts_the_same(model, task, theirs, served):
    adapted = harness_model(OpenedModel("made", model, ServingConfig(), "gpt2"), served=served)
    for ours, sample in zip(lm_eval_reference.samples(adapted, task), theirs, strict=True):
        assert lm_eval_reference.scores(ours) == pytest.approx(
            lm_eval_reference.scores(sample), abs=2e-3
        )
        assert lm_eval_reference.prediction(ours) == lm_eval_reference.prediction(sample)
