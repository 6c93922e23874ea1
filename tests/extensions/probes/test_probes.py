"""The probes, the needle by a model whose weights look up what followed a token: its reach is known."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kvlab.evaluate import Evaluation, evaluate
from kvlab.extensions.probes.probes import (
    make_needle_rows,
    make_recall_rows,
    measure_probes,
    needle_lines,
    recall_measurements,
    score_needles,
    score_recall,
)
from kvlab.model import GPT
from kvlab.report.document import Document
from kvlab.report.markdown import render_markdown
from kvlab.spec import Experiment, ModelConfig, ServingConfig
from kvlab.store.metrics import METRICS, collect_metrics
from tests.contracts.section_contract import ReportSectionContract
from tests.report.full_record import FullRecord
from tests.report.reading import load
from tests.support.golden import check_golden
from tests.support.random_model import random_model
from tests.support.record_factory import Record
from tests.support.tiny_training import experiment

SHAPE = {"vocab_size": 258, "block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 16}
SERVING = ServingConfig()
TEXT = np.random.default_rng(5).integers(0, 256, 2000).astype(np.uint16)


def loud(**changes):
    return random_model(ModelConfig(**{**SHAPE, **changes}), dtype=torch.float32).eval()


def test_rows_are_pairs_and_then_the_keys_again():
    rows = make_recall_rows(5, 32, 256)
    assert rows.tokens.shape == (5, 32)
    assert rows.pairs == 8
    for tokens, values, answers, distances in zip(
        rows.tokens, rows.values, rows.answers, rows.distances, strict=True
    ):
        pairs = dict(zip(tokens[0:16:2], tokens[1:16:2], strict=True))
        assert len({*tokens[:16]}) == 16, "no token twice among keys and values"
        repeated = list(zip(tokens[16::2], tokens[17::2], strict=True))
        assert sorted(repeated) == sorted(pairs.items())
        assert [values[a] for a in answers] == [pairs[key] for key, _ in repeated]
        for position, distance, (key, _) in zip(rows.positions, distances, repeated, strict=True):
            assert tokens[position] == key
            assert tokens[position - distance] == pairs[key]
    assert len({tuple(row) for row in rows.tokens}) == 5
    assert (make_recall_rows(2, 32, 256).tokens == rows.tokens[:2]).all(), "a row is its number's"
    assert make_recall_rows(1, 1024, 20).pairs == 10, "as many as there are words"


def test_recall_is_the_best_of_the_rows_values():
    model, rows = loud(), make_recall_rows(40, 32, 256)
    right = score_recall(model, rows, None)
    logits = model(torch.from_numpy(rows.tokens)).detach()
    for r in range(40):
        for i, position in enumerate(rows.positions):
            scores = [float(logits[r, position, value]) for value in rows.values[r]]
            assert right[r, i] == (scores.index(max(scores)) == rows.answers[r, i])
    assert 0 < right.mean() < 0.5, "weights that learnt nothing guess"
    measurements = recall_measurements(rows, right, "_served")
    far = [right[r, i] for r in range(40) for i in range(8) if rows.distances[r, i] > 16]
    near = [right[r, i] for r in range(40) for i in range(8) if rows.distances[r, i] <= 8]
    assert measurements == pytest.approx({
        "recall_acc_served": right.mean(),
        "recall_acc_far_served": np.mean(far),
        "recall_acc_near_served": np.mean(near),
    })  # fmt: skip


@pytest.mark.parametrize("served", [True, False])
def test_recall_is_measured_as_asked(served):
    evaluation = {"loss_tokens": 96, "served": served, "recall": 4}
    of = experiment(SHAPE, evaluation=evaluation)
    counted = []

    def progress(note, tokens):  # noqa: ARG001
        counted.append(-tokens)
        return SimpleNamespace(advance=lambda count, *_: counted.append(count), keep=map)

    measurements = measure_probes(GPT(of.model), TEXT, of, progress).measurements
    assert set(measurements) <= set(METRICS)
    assert sum(counted) == 0, "progress reaches its end"
    assert ("recall_acc_served" in measurements) == served
    assert measurements["recall_rows"] == 4
    plain = of.model_copy(update={"evaluation": type(of.evaluation)()})
    assert measure_probes(GPT(of.model), TEXT, plain, progress) == Evaluation({})


WORDS, LENGTH = 60, 39
BODY = LENGTH - 7
PLACES = BODY - 8
"""The last place of the needle, of 8 tokens, in a text of `BODY` tokens."""
EVERYWHERE = tuple(place / PLACES for place in range(PLACES + 1))
WORDS_TEXT = np.random.default_rng(5).integers(0, WORDS, 3000).astype(np.uint16)
PLAIN = ServingConfig()


def rows(depths=EVERYWHERE, count=4, length=LENGTH):
    return make_needle_rows(WORDS_TEXT, length, depths, count, WORDS)


def copier(**changes):
    """Induction (arXiv 2209.11895): layer 0 stores the token before each, layer 1 looks it up.

    The residual stream has one dimension for each token, position, token before, and prediction.
    """
    width = 3 * WORDS + LENGTH
    token, place, before, out = (start + torch.arange(n) for start, n in (
        (0, WORDS), (WORDS, LENGTH), (WORDS + LENGTH, WORDS), (2 * WORDS + LENGTH, WORDS)
    ))  # fmt: skip
    shape = {"vocab_size": WORDS, "block_size": LENGTH, "n_layer": 2, "n_head": 1,
             "n_embd": width, "norm": "rmsnorm", "bias": False, "tie_embeddings": False}  # fmt: skip
    model = GPT(ModelConfig(**{**shape, **changes}))
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        parameters["token_embedding.weight"][range(WORDS), token] = 1
        parameters["position_embedding.weight"][range(LENGTH), place] = 1
        for layer, (query, key, value, target, ones) in enumerate((
            (place[1:], place[:-1], token, before, 2), (token, before, token, out, 3)
        )):  # fmt: skip
            unit = (ones / width) ** 0.5  # of the stream after its norm, inverted
            sharp = 40**0.5 * width**0.25 * unit  # a match scores 40
            name = f"blocks.{layer}.attention."
            q, k, v = parameters[f"{name}qkv.weight"].split(width)
            q[range(len(query)), query] = sharp
            k[range(len(key)), key] = sharp
            v[range(WORDS), value] = unit
            parameters[f"{name}proj.weight"][target, range(WORDS)] = 1
        parameters["lm_head.weight"][range(WORDS), out] = 20 * (4 / width) ** 0.5
    return model.eval()


def test_rows_differ_in_the_needle_alone():
    made = rows((0.0, 0.5, 1.0), count=5)
    assert made.tokens.shape == (4, 5, LENGTH)
    starts = np.linspace(0, len(WORDS_TEXT) - BODY, 5).astype(int)
    for r, start in enumerate(starts):
        text = WORDS_TEXT[start : start + BODY]
        question = made.tokens[3, r, BODY:]
        assert (made.tokens[3, r, :BODY] == text).all()
        needle = np.concatenate([question[:4], made.answers[r]])
        assert (question[4:] == made.answers[r, :3]).all()
        assert len({*needle}) == 8
        assert not {*needle} & {*text.tolist()}, "what the key recalls stands in the needle alone"
        for depth, place in enumerate((0, PLACES // 2, PLACES)):
            expected = text.copy()
            expected[place : place + 8] = needle
            assert (made.tokens[depth, r, :BODY] == expected).all()
            assert (made.tokens[depth, r, BODY:] == question).all()
    again = rows((0.0, 0.5, 1.0), count=5)
    assert (again.tokens == made.tokens).all()
    counts = np.bincount(WORDS_TEXT, minlength=WORDS) + 1
    assert made.chance == pytest.approx(-np.log(counts / counts.sum())[made.answers].mean())


def test_needles_follow_the_text_s_words_and_a_text_of_few_words_has_some_too():
    frequent = np.where(np.arange(3000) % 7 == 0, np.arange(3000) % WORDS, 7).astype(np.uint16)
    drawn = make_needle_rows(frequent, LENGTH, (0.5,), 200, 200).answers
    assert drawn.max() < WORDS, "tokens that never occur are not drawn"
    few = make_needle_rows(np.full(100, 3, np.uint16), LENGTH, (0.5,), 2, WORDS)
    assert {len({*answer}) for answer in few.answers.tolist()} == {4}


@pytest.mark.parametrize("serving", [None, PLAIN])
def test_it_is_lost_exactly_where_the_window_ends(serving):
    everywhere = score_needles(copier(), rows(), serving)
    assert (everywhere.accuracies[:-1] == 1).all()
    assert everywhere.losses[:-1].max() < 1e-4
    assert everywhere.losses[-1].min() > 1, "without a needle there is nothing to copy"
    assert everywhere.accuracies[-1].max() == 0
    window = 10
    scores = score_needles(copier(attention_pattern="GL", window=window), rows(), serving)
    for place in range(PLACES + 1):
        distance = (LENGTH - 4) - (place + 4)  # from a question's token back to its answer's
        if distance < window:
            assert (scores.accuracies[place] == 1).all()
        else:
            assert scores.accuracies[place].max() < 1
            assert scores.losses[place].min() > 1
        if distance >= window + 8:  # nor does any token see the needle's end
            assert scores.losses[place] == pytest.approx(scores.losses[-1], abs=1e-5)


def test_a_tie_at_serving_loses_it_though_one_shot_finds_it():
    made, model = rows((0.0, 1.0)), copier()
    tied = ServingConfig(tie="adjacent:2", tie_rule="owner")
    ways = (score_needles(model, made, serving) for serving in (None, tied))
    for line in needle_lines(made, *ways):
        assert (line["accuracy"], line["accuracy_served"]) == (1, 0)
        assert line["loss_change"] == pytest.approx(line["loss_served"] - line["loss"])
        assert line["loss_change"] > 5 * line["loss_change_stderr"]
        assert line["gain"] > 1 > abs(line["gain_served"])


def test_scores_are_those_of_the_logits_and_lines_their_means():
    model = random_model(ModelConfig(vocab_size=WORDS, block_size=LENGTH, n_layer=2, n_head=2,
                                     n_embd=16))  # fmt: skip
    made = rows((0.25, 0.75), count=6)
    scores = score_needles(model, made, None)
    losses = np.zeros((3, 6, 4))
    for d in range(3):
        logits = model(torch.from_numpy(made.tokens[d])).detach()[:, -4:]
        targets = torch.from_numpy(made.answers)
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        losses[d] = nats.view(6, 4).numpy()
        hits = (logits.argmax(-1) == targets).double().mean(1)
        assert scores.accuracies[d] == pytest.approx(hits.numpy())
    assert scores.losses == pytest.approx(losses.mean(2))
    line = needle_lines(made, scores, None)[1]
    gains = (losses[2] - losses[1]).mean(1)
    assert line["gain"] == pytest.approx(gains.mean())
    assert line["gain_stderr"] == pytest.approx(gains.std(ddof=1) / 6**0.5)
    assert (line["length"], line["depth"], line["rows"]) == (LENGTH, 0.75, 6)
    assert not [name for name in line if "served" in name or "change" in name]


@pytest.mark.parametrize("served", [True, False])
def test_an_evaluation_records_a_line_for_each_length_and_depth(served):
    needle = {"lengths": [32, 64], "depths": [0.0, 1.0], "rows": 3}
    evaluation = {"loss_tokens": 64, "served": served, "needle": needle}
    of = experiment({"block_size": 64}, evaluation=evaluation)
    evaluation = evaluate(GPT(of.model), SimpleNamespace(validation=WORDS_TEXT), of)
    places = [(line["length"], line["depth"]) for line in evaluation.lines["needle"]]
    assert places == [(32, 0.0), (32, 1.0), (64, 0.0), (64, 1.0)]
    measured = {name for name in evaluation.measurements if name.startswith("needle")}
    assert measured <= set(METRICS)
    assert ("needle_loss_served" in measured) == served
    metrics = collect_metrics({"measurements": evaluation.measurements})
    mean = np.mean([line["loss"] for line in evaluation.lines["needle"]])
    assert metrics["needle_loss"] == pytest.approx(mean)
    if served:
        changes = [line["loss_change"] for line in evaluation.lines["needle"]]
        assert metrics["needle_loss_change"] == pytest.approx(np.mean(changes), abs=1e-9)


DEPTHS = (0.0, 0.5, 1.0)


def needle_line(length, depth, levels, seed):
    """Found one-shot everywhere, and served unless tied; 0.1 off at every seed."""
    lost = 4.0 if levels["sharing"] == "tied" else 0.0
    loss = 1.0 + depth + length / 64 + 0.1 * seed
    values = {
        "loss": loss, "loss_absent": 6.0 + 0.1 * seed, "accuracy": 0.5 + 0.01 * seed,
        "loss_served": loss + lost, "loss_absent_served": 6.0 + 0.1 * seed,
        "accuracy_served": 0.25, "loss_change": lost,
    }  # fmt: skip
    values |= {"gain": 5 - depth - length / 64}
    values |= {"gain_served": values["gain"] - 2 * lost}
    errors = {f"{name}_stderr": 0.2 for name in values}
    return {"length": length, "depth": depth, "rows": 8, "chance": 5.5, **values, **errors}


class ProbedRecord(FullRecord):
    """A full record with both probes; ties recall less when served."""

    def measurements(self, levels, seed):
        found = super().measurements(levels, seed) | {"recall_rows": 32, "recall_pairs": 64}
        for ending, less in (("", 0.0), ("_served", 0.125)):
            found |= {f"recall_acc{ending}": 0.5 - less + 0.01 * seed}
            found |= {f"recall_acc_near{ending}": 0.75 - less, f"recall_acc_far{ending}": 0.25}
        return found

    def result(self, levels, seed, status):
        result = super().result(levels, seed, status)
        if status == "done":
            result["needle"] = [needle_line(64, depth, levels, seed) for depth in DEPTHS]
        return result


@pytest.fixture(scope="module")
def name():
    return "probes"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return load(ProbedRecord(), tmp_path_factory.mktemp("probed"))


@pytest.fixture(scope="module")
def empty_study(tmp_path_factory):
    return load(Record(status=lambda *_: "missing"), tmp_path_factory.mktemp("empty"))


class TestProbes(ReportSectionContract):
    def test_it_reads_as_written(self, name, study):
        said = render_markdown(Document("made", {name: self.table[name].make(study)}))
        check_golden(Path(__file__).with_name("report.txt"), said)


def test_recall_is_refused_where_a_row_has_no_place():
    shape = {"vocab_size": 257, "n_layer": 1, "n_head": 1, "n_embd": 8}
    facts = {"name": "small", "data": {"tokenizer": "bytes"}, "evaluation": {"recall": 2}}
    facts |= {"training": {"tokens": 0}, "benchmark": {"prompt_tokens": 1, "new_tokens": 1}}
    assert Experiment.model_validate({**facts, "model": {**shape, "block_size": 4}})
    with pytest.raises(ValueError, match="needs rows of 4 tokens, and block_size = 3"):
        Experiment.model_validate({**facts, "model": {**shape, "block_size": 3}})
