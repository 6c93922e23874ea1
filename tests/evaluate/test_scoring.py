import copy
import random
from types import SimpleNamespace

import pytest
import torch

from kvlab.evaluate import forward_passes, scoring
from kvlab.evaluate.scoring import score_pairs
from kvlab.model import GPT
from kvlab.model.generate import StaticDecoder, prefill
from kvlab.spec import ModelConfig, ServingConfig
from kvlab.spec.dtypes import KVStorage
from tests.support.compiled_steps import watch_compiled_steps
from tests.support.random_model import random_model

CONFIG = ModelConfig(vocab_size=60, block_size=24, n_layer=2, n_head=2, n_embd=16)
MODEL = random_model(CONFIG, dtype=torch.float32).eval()


def some_pairs():
    rng = random.Random(2)
    words = lambda count: [rng.randrange(60) for _ in range(count)]  # noqa: E731
    shared = words(7)
    pairs = [(shared, words(n)) for n in (1, 4, 2)]
    return pairs + [(words(a), words(b)) for a, b in ((1, 1), (20, 9), (30, 3), (2, 40), (5, 20))]


def by_hand(context, ending):
    """One pair, as anybody would write it down."""
    tokens = (context + ending)[-25:]
    scored = min(len(ending), len(tokens) - 1)
    logits = MODEL(torch.tensor([tokens[:-1]]))[0].detach().log_softmax(-1)
    targets, rows = tokens[-scored:], logits[-scored:]
    nats = sum(float(row[token]) for row, token in zip(rows, targets, strict=True))
    return nats, rows.argmax(-1).tolist() == targets


def greedy_pair(context, count):
    ids = list(context)
    for _ in range(count):
        ids.append(int(MODEL(torch.tensor([ids]))[0, -1].argmax()))
    return context, ids[len(context) :]


@pytest.mark.parametrize("rows", [4, 64])
def test_the_step_that_is_scored_is_the_compiled_one_and_of_one_size(rows, monkeypatch):
    """It is compiled, and on CUDA captured, once. Padded rows and texts change no score."""
    sizes, decoders = watch_compiled_steps(monkeypatch), []
    monkeypatch.setattr(
        scoring, "StaticDecoder", lambda *a, **k: decoders.append(1) or StaticDecoder(*a, **k)
    )
    monkeypatch.setitem(forward_passes.DECODE_ROWS, "cpu", rows)
    targets = [by_hand(*pair)[0] for pair in some_pairs()]
    done = []
    part = SimpleNamespace(advance=lambda count, *_: done.append(count), keep=map)
    scores = score_pairs(MODEL, some_pairs(), ServingConfig(compile=True), part)
    assert [-score.nats for score in scores] == pytest.approx(targets, abs=1e-4)
    longest = 22 + 24 - 1  # the longest context and ending that are left of 25 tokens
    assert sizes == {(min(rows, len(targets)), longest)}
    assert sum(done) == len(targets)
    assert len(decoders) == 1


@pytest.mark.parametrize("serving", [None, ServingConfig()])
def test_each_pair_is_scored_as_if_alone(serving):
    pairs = [*some_pairs(), greedy_pair([3, 1, 4], 5), greedy_pair([9], 1)]
    targets = [by_hand(*pair) for pair in pairs]
    scores = score_pairs(MODEL, pairs, serving)
    assert [-score.nats for score in scores] == pytest.approx(
        [nats for nats, _ in targets], abs=1e-4
    )
    assert [score.is_greedy for score in scores] == [greedy for _, greedy in targets]
    assert [greedy for _, greedy in targets][-2:] == [True, True]
    assert not all(greedy for _, greedy in targets)


def test_one_shot_a_context_is_computed_once(monkeypatch):
    sizes, make = [], scoring.TreePass
    monkeypatch.setattr(scoring, "TreePass", lambda *a: sizes.append(a[2].shape) or make(*a))
    # endings of 1, 4 and 2 tokens, of which none feeds its last
    score_pairs(MODEL, some_pairs()[:3])
    assert sizes == [(1, 7 + 0 + 3 + 1)]


def test_a_model_that_was_trained_coarsely_is_scored_one_shot_as_it_is_served():
    check_trained_storage(KVStorage("int4", 8))


def check_trained_storage(kv):
    model = copy.deepcopy(MODEL).double()
    exact = score_pairs(model, some_pairs())
    model.trained_kv = kv
    serving = ServingConfig(**kv.settings)
    one_shot, served = score_pairs(model, some_pairs()), score_pairs(model, some_pairs(), serving)
    nats = [[score.nats for score in scores] for scores in (one_shot, served, exact)]
    assert nats[0] == pytest.approx(nats[1], abs=1e-5)
    assert nats[0] != pytest.approx(nats[2], abs=1e-3)


def test_no_token_that_is_scored_through_the_cache_waits_for_the_device(monkeypatch):
    """On the device `meta` tensors have no values: whatever asks for one fails."""
    config = ModelConfig(
        vocab_size=60, block_size=24, n_layer=3, n_head=2, n_embd=16, position="rope",
        attention_pattern="GLL", window=3,
    )  # fmt: skip
    model, serving = GPT(config, device="meta"), ServingConfig(kv_dtype="int8", tie="adjacent:2")
    monkeypatch.setattr(forward_passes, "make_decoder", StaticDecoder)  # as on CUDA
    tokens = torch.zeros(2, 2, dtype=torch.int64, device="meta")
    with torch.inference_mode():
        states = forward_passes.hidden_states(model, tokens, serving)
        assert states.shape == (2, 2, 16)
        cache = model.new_cache(2, 5, serving)
        prefill(model, tokens, cache)
        decoder = StaticDecoder(model, cache, head=False, compiles=cache.compiles_steps)
        steps = [decoder(column) for column in tokens.unbind(1)]
        assert [step.shape for step in steps] == [(2, 16)] * 2
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            steps[0][0, 0].item()
