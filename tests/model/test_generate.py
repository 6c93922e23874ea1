"""Generation: cached equals uncached, sampling follows its distribution, rows end apart."""

import math
from functools import partial

import pytest
import torch

from kvlab.cache import KVCache
from kvlab.errors import CacheError
from kvlab.model import generate as generation
from kvlab.model.attention_backends import record_kernels
from kvlab.model.decode_attention import DECODE_KERNEL
from kvlab.model.generate import (
    EagerDecoder,
    Sampling,
    StaticDecoder,
    generate,
    make_decoder,
    prefill,
    sample,
)
from kvlab.spec import ModelConfig, ServingConfig
from tests.support.fake_cuda import FakeCuda
from tests.support.random_model import random_model

CONFIG = ModelConfig(
    vocab_size=41, block_size=64, n_layer=6, n_head=4, n_kv_head=2, n_embd=32, position="rope",
    attention_pattern="GLL", window=7, kv_sharing="adjacent:2",
)  # fmt: skip
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8], [9, 7, 9, 3, 2]]


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG, std=0.3)


@pytest.fixture(scope="module")
def small():
    """One global layer and two local ones, which share K/V: for steps that are traced."""
    return random_model(CONFIG.model_copy(update={"n_layer": 3}), std=0.3)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_k=20, top_p=0.9)])
def test_cached_and_uncached_give_the_same_tokens(model, sampling):
    cached = generate(model, PROMPTS, 30, sampling=sampling, seed=5)
    assert cached == generate(model, PROMPTS, 30, sampling=sampling, seed=5, cached=False)
    assert [len(row) for row in cached] == [30, 30, 30]
    if not sampling.temperature:
        assert cached == [generate(model, [prompt], 30)[0] for prompt in PROMPTS]
    other = generate(model, PROMPTS, 30, sampling=sampling, seed=6)
    assert (cached == other) == (sampling.temperature == 0), "draws depend on their seed"


@pytest.mark.parametrize("lengths", [None, [9, 4, 1]])
def test_selected_tokens_are_those_of_a_whole_pass(model, lengths):
    tokens = torch.randint(0, 41, (3, 9), generator=torch.Generator().manual_seed(1))
    ends = torch.tensor(lengths or [9, 9, 9])
    indices = torch.tensor([12, 0, 9, 18])
    caches = [model.new_cache(3, 12) for _ in range(3)]
    whole = model.hidden_states(tokens, caches[0], lengths)
    some = model.hidden_states(tokens, caches[1], lengths, token_indices=indices)
    assert (some - whole.flatten(0, 1)[indices]).abs().max() < 1e-12
    logits = model.compute_logits(whole[torch.arange(3), ends - 1])
    assert (prefill(model, tokens, caches[2], lengths) - logits).abs().max() < 1e-12
    assert (prefill(model, tokens, None, lengths) - logits).abs().max() < 1e-12
    further = [model(tokens[:, :1], cache) for cache in caches]
    assert all(torch.equal(further[0], each) for each in further), "the caches hold the same"


def test_rows_end_with_their_stop_token(model):
    free = generate(model, PROMPTS, 30)
    stop = {free[0][4], free[1][9]}
    seen = []
    ended = generate(model, PROMPTS, 30, stop=stop, on_tokens=seen.append)
    for row, whole in zip(ended, free, strict=True):
        first = next((i for i, token in enumerate(whole) if token in stop), 29)
        assert row == whole[: first + 1]
    assert [step[0] for step in seen][: len(ended[0])] == ended[0]
    assert generate(model, PROMPTS, 30, stop=stop) == ended


def test_the_static_step_of_graphs_computes_the_same(small, traced_steps):
    """`tests/test_gpu_page.py` compares it for more caches."""
    lengths = [len(prompt) for prompt in PROMPTS]
    longest = max(lengths)
    padded = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in PROMPTS])
    logits = []
    for decoder in (EagerDecoder, StaticDecoder, partial(StaticDecoder, compiles=True)):
        cache = small.new_cache(3, longest + 20, ServingConfig(kv_dtype="int8"))
        with torch.inference_mode():
            steps = [prefill(small, padded, cache, lengths)]
            decode = decoder(small, cache)
            steps += [decode(torch.full((3,), index)).clone() for index in range(20)]
        logits.append(torch.stack(steps))
        with pytest.raises(CacheError, match="do not fit"):
            decode(torch.zeros(3, dtype=torch.int64))
    for other in logits[1:]:
        assert (logits[0] - other).abs().max() < 1e-10
    assert len(traced_steps) == 1, "of twenty steps"


@pytest.fixture
def traced_steps(monkeypatch):
    """Graphs of the steps that were compiled, which run as they are."""
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    step = torch.compile(generation._run_step, fullgraph=True, dynamic=False, backend=backend)
    monkeypatch.setattr(generation, "_compile_step", lambda: step)
    return graphs


def test_a_step_is_compiled_once_for_each_size(small, traced_steps, monkeypatch):
    """Before the first token, and again only if a size is new or there are too many of them."""

    def decode(rows, length, tokens=3):
        cache = small.new_cache(rows, length, ServingConfig(compile=True))
        with torch.inference_mode():
            prefill(small, torch.ones(rows, 4, dtype=torch.int64), cache)
            step = make_decoder(small, cache)
            made = len(traced_steps)
            for _ in range(tokens):
                step(torch.ones(rows, dtype=torch.int64))
        assert len(traced_steps) == made
        assert step.count_read_slots(5) == length + 2 * 7
        return made

    with record_kernels() as kernels:  # the first turn of a benchmark; the second is timed
        assert decode(2, 20) == 1
    assert kernels
    assert [decode(2, 20), decode(1, 20), decode(2, 24), decode(2, 20)] == [1, 2, 3, 3]
    monkeypatch.setattr(generation, "STEP_SHAPES", 3)
    assert [decode(3, 20), decode(3, 20), decode(2, 20)] == [4, 4, 5], "all are compiled anew"


@pytest.mark.faults
def test_a_compiled_step_computes_what_the_eager_one_does():
    """By the compiler that a device uses, in one window and one global layer."""
    torch.compiler.reset()
    generation._compile_step.cache_clear()
    config = CONFIG.model_copy(update={"n_layer": 2, "attention_pattern": "GL"})
    model, logits = random_model(config, std=0.3), []
    for serving in (ServingConfig(), ServingConfig(compile=True)):
        cache = model.new_cache(2, 16, serving)
        with torch.inference_mode():
            prefill(model, torch.tensor([PROMPTS[0], PROMPTS[0][::-1]]), cache)
            step = make_decoder(model, cache)
            steps = [step(torch.tensor([index, 7])).clone() for index in range(4)]
        logits.append(torch.stack(steps))
    assert (logits[0] - logits[1]).abs().max() < 1e-10


@pytest.mark.parametrize("decoder", [EagerDecoder, StaticDecoder])
def test_a_step_follows_its_cache(model, decoder):
    """Through resets and further passes: what it computes is what a new one computes."""
    cache, text = model.new_cache(2, 24), torch.arange(16).view(2, 8)
    with torch.inference_mode():
        step = decoder(model, cache)
        for tokens in (text[:, :5], text[:, 3:6]):
            cache.reset()
            prefill(model, tokens, cache)
            for position in range(2):
                actual = step(text[:, position]).clone()
                whole = torch.cat([tokens, text[:, : position + 1]], 1)
                assert (actual - model(whole)[:, -1]).abs().max() < 1e-10


def test_a_cache_has_one_graph(model, monkeypatch, traced_steps):
    """It reads all entries, or where the kernel of one token's attention runs those in use."""
    cuda = FakeCuda(monkeypatch)
    with torch.inference_mode():
        cache = model.new_cache(1, 2000)
        prefill(model, torch.tensor([[1, 2]]), cache)
        decoders = [generation.GraphDecoder(model, cache, compiles=one) for one in (True, False)]
        for decoder in decoders:
            assert decoder.count_read_slots(3) == 2 * 2000 + 4 * 7
            decoder._kernels = {DECODE_KERNEL}
            assert decoder.count_read_slots(3) == 6 * 4
        assert cuda.log == [*cuda.streams, "replay"] * 2
        for decoder in decoders:
            decoder(torch.tensor([3]))
    assert len(traced_steps) == 1
    assert cuda.log[4:] == ["replay"] * 2
    assert cache.length == 4


def test_a_prefill_in_slices_is_the_same(model, monkeypatch):
    """Five rows in slices of two, and the cache holds what a whole pass leaves in it."""
    tokens = torch.randint(0, 41, (5, 9), generator=torch.Generator().manual_seed(1))
    caches = [model.new_cache(5, 12, ServingConfig(kv_dtype="int8")) for _ in range(2)]
    monkeypatch.setitem(generation.SLICE_TOKENS, "cpu", 20)
    rows, begin_pass = [], KVCache.begin_pass
    monkeypatch.setattr(
        KVCache, "begin_pass", lambda c, *a: rows.append(c.batch_size) or begin_pass(c, *a)
    )
    with torch.inference_mode():
        sliced = generation.prefill_in_slices(model, tokens, caches[0])
        assert rows == [2, 2, 1]
        assert (sliced - prefill(model, tokens, caches[1])).abs().max() < 1e-12
        further = [model(tokens[:, :1], cache) for cache in caches]
    assert (further[0] - further[1]).abs().max() < 1e-12


def test_sampling_follows_the_distribution():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = probabilities.log().expand(20_000, 4)
    generator = torch.Generator().manual_seed(0)

    def frequencies(sampling):
        return torch.bincount(sample(logits, sampling, generator), minlength=4) / 20_000

    for sampling, expected in (
        (Sampling(1.0), probabilities),
        (Sampling(1.0, top_k=2), torch.tensor([0.625, 0.375, 0, 0])),
        (Sampling(1.0, top_p=0.81), torch.tensor([0.5, 0.3, 0.15, 0]) / 0.95),
        (Sampling(1.0, top_p=0.3), torch.tensor([1.0, 0, 0, 0])),
        (Sampling(0.5), probabilities**2 / (probabilities**2).sum()),
        (Sampling(0.0), torch.tensor([1.0, 0, 0, 0])),
    ):
        assert (frequencies(sampling) - expected).abs().max() < 0.012  # 3.4 standard errors
    assert sample(logits[:9].flip(-1), Sampling(1e-45), generator).tolist() == 9 * [3]


def test_impossible_arguments_are_refused(model):
    for wrong in ({"temperature": -1}, {"temperature": math.nan}, {"temperature": math.inf},
                  {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Sampling(**wrong)
    with pytest.raises(ValueError, match="prompt is empty"):
        generate(model, [[1], []], 3)
    for wrong in ({"seed": -1}, {"seed": 2**63}, {"new_tokens": 2**31}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            generate(model, PROMPTS, **{"new_tokens": 3, **wrong})
    assert generate(model, PROMPTS, 0) == [[], [], []]
