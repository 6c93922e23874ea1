"""Metrics of users' files: their means, and what of a file is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvlab.cli import shared_arguments as shared
from kvlab.data.batches import ScoredText, spread_windows
from kvlab.errors import KvlabError, SpecError
from kvlab.evaluate.forward_passes import SILENT
from kvlab.evaluate.token_metrics import score_tokens
from kvlab.model import GPT
from kvlab.spec import ModelConfig, ServingConfig, load_experiment
from kvlab.spec.members import MemberError
from kvlab.spec.token_metrics import TokenMetric, read_metric_texts
from kvlab.store.metrics import METRICS
from kvlab.trial import Trial

HEAD = "from kvlab.extend import Extension, TokenMetric\n\n\n"
FILE = (
    HEAD
    + """class Rank(TokenMetric):
    name = "rank"
    title = "rank of the right token"
    unit = "ranks"
    better = "lower"

    def score(self, tokens):
        right = tokens.logits.gather(1, tokens.targets[:, None])
        return (tokens.logits > right).sum(1)


extension = Extension(metrics=(Rank(),))
"""
)
YAML = """\
name: own
extensions: [mine.py]
model: {vocab_size: 257, block_size: 16, n_layer: 2, n_head: 2, n_embd: 16}
data: {tokenizer: bytes}
evaluation: {loss_tokens: 64}
benchmark: {prompt_tokens: 8, new_tokens: 8}
"""


class Rank(TokenMetric):
    name, title, unit, better = "rank", "rank of the right token", "ranks", "lower"

    def score(self, tokens):
        right = tokens.logits.gather(1, tokens.targets[:, None])
        return (tokens.logits > right).sum(1)


def write(folder, text=FILE):
    (folder / "mine.py").write_text(text)
    (folder / "e.yaml").write_text(YAML)
    return folder / "e.yaml"


@pytest.mark.parametrize("serving", [None, ServingConfig()], ids=["one-shot", "served"])
def test_the_mean_is_that_over_all_targets_of_the_text(serving):
    config = ModelConfig(vocab_size=97, block_size=32, n_layer=2, n_head=2, n_embd=16)
    model = GPT(config, seed=3, dtype=torch.float64)
    tokens = np.random.default_rng(0).integers(0, 97, 32 * 150 + 1, dtype=np.uint16)
    text = spread_windows(tokens, 32 * 150, 32)
    logits = model(torch.from_numpy(tokens[:-1].astype(np.int64)).view(150, 32)).flatten(0, 1)
    targets = torch.from_numpy(tokens[1:].astype(np.int64))
    right = logits.gather(1, targets[:, None])
    expected = float((logits > right).sum(1).double().mean())
    assert score_tokens(model, text, (Rank(),), serving, SILENT) == {
        "rank": pytest.approx(expected, rel=1e-6)
    }


def test_adding_a_metric_makes_a_new_trial_of_the_same_training(tmp_path):
    own = Trial.of(load_experiment(write(tmp_path)), "text", 0)
    plain = Trial.of(load_experiment(write(tmp_path), {"extensions": []}), "text", 0)
    edited = Trial.of(load_experiment(write(tmp_path, FILE.replace(">", ">="))), "text", 0)
    assert own.training_id == plain.training_id == edited.training_id
    assert len({own.id, plain.id, edited.id}) == 3


def test_a_report_knows_a_metric_from_the_text_alone():
    (found,) = read_metric_texts(FILE)
    assert found[:4] == ("rank", "rank of the right token", "ranks", "lower")
    assert list(read_metric_texts("class (")) == []
    forged = FILE.replace("rank of the right token", "\\x1b[2J")  # clears a terminal
    assert list(read_metric_texts(forged)) == []
    METRICS.offer([FILE])
    assert METRICS["rank_served"].title == "rank of the right token, served"
    assert METRICS.is_offered("rank")
    assert not METRICS.is_offered("loss")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"rank of the right token"', '"rank" + " of it"'), "mine.py:4:1: Rank is not described"),
        (('"lower"', '"least"'), "mine.py:4:1: Rank is not described"),
        (('"rank"\n', '"Rank!"\n'), "mine.py:4:1: Rank is not described"),
    ],
)
def test_what_no_report_could_read_is_refused_with_its_line(tmp_path, change, message):
    with pytest.raises(SpecError) as error:
        load_experiment(write(tmp_path, FILE.replace(*change)))
    assert message in str(error.value)


def test_a_name_of_a_metric_of_kvlab_is_refused(tmp_path):
    write(tmp_path, FILE.replace('"rank"\n', '"loss"\n'))
    (tmp_path / "s.yaml").write_text("question: What?\nexperiment: e.yaml\nfactors: {a: {b: {}}}\n")
    with pytest.raises(KvlabError, match=r"mine.py:4: loss is a metric of kvlab itself; rename it"):
        shared.read_sweep(str(tmp_path / "s.yaml"), None)


class Sum(Rank):
    def score(self, tokens):
        return super().score(tokens).sum()


class Infinite(Rank):
    def score(self, tokens):
        return super().score(tokens) / torch.zeros(())


class Array(Rank):
    def score(self, tokens):
        return super().score(tokens).numpy()


class Rare(Rank):
    name = "rare"

    def score(self, tokens):
        return super().score(tokens), tokens.targets >= self.least

    least = 90


class Rarer(Rare):
    least = 97


class Empty(Rare):
    def score(self, _tokens):
        return ()


class Shares(Rare):
    def score(self, tokens):
        values, counts = super().score(tokens)
        return values, counts.double()


WRONG = [
    (Sum(), "for 80 tokens"),
    (Infinite(), "finite"),
    (Array(), "ndarray; return a tensor"),
    (Shares(), "returns torch.float64 beside numbers; return a tensor of bool"),
    (Rarer(), "counts none of the 80 tokens of the text; set larger loss_tokens"),
    (Empty(), "returns a tuple of 0; return numbers, or a pair of numbers and a tensor of bool"),
]


@pytest.mark.parametrize(("metric", "message"), WRONG)
def test_what_is_not_a_finite_number_for_each_token_fails_the_measurement(metric, message):
    model = GPT(ModelConfig(vocab_size=97, block_size=16, n_layer=1, n_head=2, n_embd=16), seed=3)
    tokens = np.random.default_rng(0).integers(0, 97, 81, dtype=np.uint16)
    with pytest.raises(MemberError, match=message):
        score_tokens(model, spread_windows(tokens, 80, 16), (metric,), None, SILENT)


def test_the_mean_is_over_the_tokens_that_count():
    model = GPT(ModelConfig(vocab_size=97, block_size=16, n_layer=1, n_head=2, n_embd=16), seed=3)
    tokens = np.random.default_rng(0).integers(0, 97, 81, dtype=np.uint16)
    text = spread_windows(tokens, 80, 16)
    logits = model(torch.from_numpy(tokens[:-1].astype(np.int64)).view(5, 16)).flatten(0, 1)
    targets = torch.from_numpy(tokens[1:].astype(np.int64))
    ranks = (logits > logits.gather(1, targets[:, None])).sum(1).tolist()
    own = [rank for rank, target in zip(ranks, targets.tolist(), strict=True) if target >= 90]
    found = score_tokens(model, text, (Rare(),), None, SILENT)
    assert 0 < len(own) < 80
    assert found["rare"] == pytest.approx(sum(own) / len(own))


class Overwriting(Rank):
    name = "overwriting"

    def score(self, tokens):
        return tokens.logits.zero_()[:, 0] + sum(one.zero_().sum() for one in tokens[1:])


class Placed(Rank):
    """Whether a target stands behind a token that stood before in its window."""

    def score(self, tokens):
        read = tokens.windows[tokens.rows]
        is_before = torch.arange(read.shape[1]) < tokens.positions[:, None]
        last = read.gather(1, tokens.positions[:, None])
        return ((read == last) & is_before).any(1)


def test_a_target_that_the_last_window_repeats_counts_once():
    model = GPT(ModelConfig(vocab_size=97, block_size=64, n_layer=1, n_head=2, n_embd=16), seed=3)
    tokens = np.random.default_rng(0).integers(0, 97, 153, dtype=np.uint16)
    starts = np.array([0, 64, 88])
    text = ScoredText(tokens, starts, 64, repeated=40)
    found = score_tokens(model, text, (Rank(),), None, SILENT)["rank"]
    ranks = []
    for start in starts:
        window = torch.from_numpy(tokens[start : start + 65].astype(np.int64))
        logits = model(window[None, :-1])[0]
        ranks += (logits > logits.gather(1, window[1:, None])).sum(1).tolist()
    own = ranks[:128] + ranks[168:]
    assert len(own) == text.target_count
    assert found == pytest.approx(sum(own) / len(own))
    assert found != pytest.approx(sum(ranks) / len(ranks))


@pytest.mark.parametrize("target_ids", [None, [range(40, 97)]], ids=["all", "some"])
def test_a_metric_knows_the_tokens_that_were_read_before_each(target_ids):
    config = ModelConfig(vocab_size=97, block_size=32, n_layer=1, n_head=2, n_embd=16)
    tokens = np.random.default_rng(0).integers(0, 97, 32 * 150 + 1, dtype=np.uint16)
    text = replace(spread_windows(tokens, 32 * 150, 32), target_ids=target_ids)
    scored, ids = [], tokens.tolist()
    for i, target in enumerate(ids[1:]):
        if target_ids is None or target in target_ids[0]:
            scored.append(ids[i] in ids[i - i % 32 : i])
    found = score_tokens(GPT(config, seed=3), text, (Placed(),), None, SILENT)
    assert 0 < sum(scored) < len(scored)
    assert found["rank"] == pytest.approx(sum(scored) / len(scored))


def test_what_a_metric_overwrites_no_other_sees():
    model = GPT(ModelConfig(vocab_size=97, block_size=16, n_layer=1, n_head=2, n_embd=16), seed=3)
    tokens = np.random.default_rng(0).integers(0, 97, 81, dtype=np.uint16)
    text = spread_windows(tokens, 80, 16)
    beside = score_tokens(model, text, (Overwriting(), Rank()), None, SILENT)
    assert beside["rank"] == score_tokens(model, text, (Rank(),), None, SILENT)["rank"]
