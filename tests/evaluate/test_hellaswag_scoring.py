"""HellaSwag against ten plain lines of each convention, on items made to be awkward."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvlab.data.tokenizers import load_tokenizer
from kvlab.evaluate import evaluate
from kvlab.evaluate.hellaswag import hellaswag_measurements, score_hellaswag
from kvlab.model import GPT
from kvlab.spec import ModelConfig, ServingConfig
from kvlab.store.metrics import METRICS
from tests.support.hellaswag_items import ITEMS
from tests.support.random_model import random_model
from tests.support.tiny_training import experiment

BPE, BYTES = load_tokenizer("gpt2:2048"), load_tokenizer("bytes")


def make_model(tokens, **shape):
    config = {"block_size": 64, "n_layer": 4, "n_head": 2, "n_embd": 16}
    config |= {"vocab_size": tokens.vocab_size, **shape}
    return random_model(ModelConfig(**config), dtype=torch.float32, std=0.15)


def log_likelihood(model, context, ending, end_of_text):
    """The plain way: one row, no padding, no cache. Also the share of the ending that fits."""
    ids = ((context or [end_of_text]) + ending)[-model.config.block_size - 1 :]
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
    scored = min(len(ending), len(ids) - 1)
    total = sum(logits[-scored + i, token].item() for i, token in enumerate(ids[-scored:]))
    return total, scored / len(ending)


def plain_completion(model, item, tok):
    context = tok.encode(item.ctx)
    endings = [tok.encode(" " + ending) for ending in item.endings]
    found = [log_likelihood(model, context, ending, tok.end_of_text) for ending in endings]
    sums = [total for total, _ in found]
    means = [s / (share * len(e)) for (s, share), e in zip(found, endings, strict=True)]
    return sums, int(np.argmax(sums)), int(np.argmax(means))


def plain_lmeval(model, item, tok):
    def clean(text):
        return re.sub("\\[.*?\\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    query = clean(item.activity_label + ": " + item.ctx_a + " " + item.ctx_b.capitalize())
    choices = [clean(ending) for ending in item.endings]
    context = tok.encode(query.rstrip())
    found = [
        log_likelihood(model, context, tok.encode(query + " " + c)[len(context) :], tok.end_of_text)
        for c in choices
    ]
    sums = [total for total, _ in found]
    with np.errstate(divide="ignore"):
        sizes = [share * len(one) for (_, share), one in zip(found, choices, strict=True)]
        normed = np.array(sums) / sizes
    return sums, int(np.argmax(sums)), int(np.argmax(normed))


PLAIN = {"completion": plain_completion, "lmeval": plain_lmeval}


@pytest.mark.parametrize(
    ("tok", "shape"),
    [
        (BPE, {}),
        (BPE, {"n_kv_head": 1, "position": "rope", "attention_pattern": "GLL", "window": 9}),
        (BPE, {"block_size": 8}),  # endings that are longer are scored by what fits
        (BYTES, {"block_size": 128, "kv_sharing": "adjacent:2"}),
    ],
)
def test_every_item_scores_as_in_the_plain_way_one_shot_and_served(tok, shape):
    model = make_model(tok, **shape)
    records = score_hellaswag(model, ITEMS, tok, ServingConfig())
    assert [(r["ind"], r["label"]) for r in records] == [(i.ind, i.label) for i in ITEMS]
    for record, item in zip(records, ITEMS, strict=True):
        for convention, plain in PLAIN.items():
            sums, prediction, prediction_norm = plain(model, item, tok)
            for mode in ("one_shot", "served"):
                scored = record[convention][mode]
                case = (item.ind, convention, mode)
                assert scored["scores"] == pytest.approx(sums, rel=1e-5), case
                assert scored["prediction"] == prediction
                assert scored["prediction_norm"] == prediction_norm
    json.dumps(records)


@pytest.mark.parametrize("convention", ["completion", "lmeval"])
def test_an_ending_that_is_longer_than_the_block_is_divided_by_what_is_scored(convention):
    model = make_model(BYTES, block_size=64)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # all bytes are as likely, so all endings are as good
    item = replace(ITEMS[0], endings=["a" * size for size in (40, 150, 70, 64)])
    (record,) = score_hellaswag(model, [item], BYTES, None)
    found = record[convention]
    shares = [
        score / size
        for score, size in zip(found["one_shot"]["scores"], found["divisors"], strict=True)
    ]
    assert shares == pytest.approx([shares[0]] * 4, rel=0.03)  # a space before an ending


def test_what_does_not_fit_is_cut_and_counted():
    records = score_hellaswag(make_model(BPE), ITEMS, BPE, None)
    cut = {r["ind"] for r in records if r["lmeval"]["shortened"]}
    lengths = {i.ind: len(BPE.encode(f"{i.activity_label}: {i.ctx}")) for i in ITEMS}
    assert lengths[120] > 40 > lengths[24]
    assert 120 in cut
    assert 24 not in cut
    assert "served" not in records[0]["completion"]
    cut |= {r["ind"] for r in records if r["completion"]["shortened"]}
    assert hellaswag_measurements(records)["hellaswag_shortened"] == len(cut)


def test_a_tied_cache_is_scored_as_it_serves():
    """The context goes in at once; then every ending token alone sees it through the cache."""
    model, serving = make_model(BPE, block_size=256), ServingConfig(tie="adjacent:2")
    records = score_hellaswag(model, ITEMS[:3], BPE, serving)
    for record, item in zip(records, ITEMS, strict=False):
        context = BPE.encode(item.ctx)
        expected = []
        for ending in item.endings:
            ids = BPE.encode(" " + ending)
            cache = model.new_cache(1, 256, serving)
            with torch.no_grad():
                logits = [model(torch.tensor([context]), cache=cache)[:, -1:]]
                logits += [model(torch.tensor([[token]]), cache=cache) for token in ids[:-1]]
            chances = torch.cat(logits, 1)[0].log_softmax(-1)
            expected.append(chances[torch.arange(len(ids)), ids].sum().item())
        scored = record["completion"]
        assert scored["served"]["scores"] == pytest.approx(expected, rel=1e-5)
        assert scored["served"]["scores"] != scored["one_shot"]["scores"]


def test_shares_and_standard_errors():
    def record(label, *predictions):
        one, two = (
            dict(zip(("prediction", "prediction_norm"), pair, strict=True))
            for pair in (predictions[:2], predictions[2:])
        )
        return {"label": label, "completion": {"shortened": False, "one_shot": one},
                "lmeval": {"shortened": False, "one_shot": two}}  # fmt: skip

    predicted = [(0, 0, 0, 1), (0, 1, 1, 1), (0, 2, 0, 0), (0, 2, 0, 0)]
    records = [record(label, *one) for label, one in enumerate(predicted)]
    measurements = hellaswag_measurements(records)
    assert measurements["hellaswag_acc"] == 0.25
    assert measurements["hellaswag_acc_norm"] == 0.75
    assert measurements["hellaswag_lmeval_acc"] == 0.5
    assert measurements["hellaswag_lmeval_acc_norm"] == 0.25
    assert measurements["hellaswag_acc_stderr"] == pytest.approx((0.25 * 0.75 / 3) ** 0.5)
    assert set(measurements) <= set(METRICS)


def test_evaluate_scores_the_first_items_under_the_known_names(monkeypatch):
    monkeypatch.setattr("kvlab.evaluate.evaluation.load_hellaswag", lambda limit: ITEMS[:limit])
    of = experiment(
        {"block_size": 256}, {"batch_tokens": 256}, evaluation={"loss_tokens": 256, "hellaswag": 3}
    )
    data = SimpleNamespace(validation=np.zeros(300, np.uint16))
    monkeypatch.setattr("kvlab.evaluate.evaluation.REPORT_SECONDS", 0.0)
    updates = []
    evaluation = evaluate(GPT(of.model), data, of, on_progress=updates.append)
    assert evaluation.measurements["hellaswag_items"] == len(evaluation.items) == 3
    names = {f"hellaswag_{kind}{mode}" for mode in ("", "_served") for kind in
             ("acc", "acc_norm", "lmeval_acc", "lmeval_acc_norm")}  # fmt: skip
    assert names <= set(evaluation.measurements) <= set(METRICS)
    assert updates[0]["stage"] == "evaluation"
    last = {update["note"].partition(", token")[0]: update for update in updates}
    assert last["HellaSwag"]["steps"] == 3 * 4 * 2 * 2
    assert all(update["step"] == update["steps"] for update in last.values())
