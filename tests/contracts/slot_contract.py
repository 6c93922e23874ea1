"""What every kind of slot must do: rows that go on apart, and what a training reads of it."""

import torch

from kvlab.cache import KVCache, begin_one_shot_pass
from kvlab.layout import KVLayout
from kvlab.model.attention import attend
from kvlab.model.decode_attention import Keys, decode_stored
from kvlab.spec import ModelConfig, ServingConfig
from tests.support.random_model import random_model

SHAPE = {"vocab_size": 29, "n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 32,
         "block_size": 64, "position": "rope"}  # fmt: skip
MODELS = [
    {}, {"attention_pattern": "GLL", "window": 14}, {"attention_pattern": "LG", "window": 3},
    {"kv_sharing": "adjacent:2"}, {"sink": "learned"},
]  # fmt: skip


def check_copies_of_rows(config, serving, count=40):
    """Copies of rows of other lengths go on as each alone, in a cache that held other tokens."""
    words = torch.randint(0, 29, (2, count), generator=torch.Generator().manual_seed(0))
    model = random_model(config)
    cache = model.new_cache(2, count, serving)
    with torch.inference_mode():
        model(words[:, :33], cache=cache)
        cache.reset()
        model(words[:, :30], cache=cache, lengths=[30, 9])
        copies = cache.select_rows(torch.tensor([1, 0, 1]))
        ends = model(words[[1, 0, 1]][:, 30:36], cache=copies)
        for place, (row, length) in enumerate([(1, 9), (0, 30), (1, 9)]):
            text = torch.cat([words[row, :length], words[row, 30:36]])[None]
            alone = model(text, cache=model.new_cache(1, count, serving))
            assert (ends[place] - alone[0, length:]).abs().max() < 1e-10
    assert cache.list_lengths() == [30, 9], "the original did not move"
    assert 2 * copies.nbytes == 3 * cache.nbytes


def serve(kv):
    return ServingConfig(**kv.settings)


def draw(seed, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def check_reads(model, kv, length, rows, dtype, seed):
    """A query of training reads bitwise what the cache decodes."""
    config, device = ModelConfig(**SHAPE, **model), torch.device("cpu")
    parts = draw(seed, 2, 3, rows, 2, length, 8, dtype=dtype)
    trained = begin_one_shot_pass(config, kv, length, device)
    layout = KVLayout.of(config, serve(kv))
    cache = KVCache(layout, rows, length, dtype, device)
    contexts = []
    for layer in range(3):
        if trained.writes_kv(layer):
            trained.write_kv(layer, *parts[:, layer])
        contexts.append(trained.read_kv(layer))
        trained.end_layer(layer)
    for place in range(length):
        step = cache.begin_pass(1)
        for layer, context in enumerate(contexts):
            if step.writes_kv(layer):
                step.write_kv(layer, *parts[:, layer, :, :, place : place + 1])
            own = step.read_kv(layer)
            positions = step.key_positions(layer)
            served = tuple(decode_stored(part, dtype) for part in own.parts)
            if own.mask is not None:
                seen = own.mask[0, 0, 0]
                served = [part[:, :, seen] for part in served]
            else:  # a ring holds the window in another order
                served = [part[:, :, positions.argsort()] for part in served]
            if context.mask is None:
                window = config.layers[layer].window or length
                keys = slice(max(0, place - window + 1), place + 1)
            else:
                keys = context.mask[0, 0, place] == 0
            for ours, its in zip(context.parts, served, strict=True):
                assert torch.equal(ours[:, :, keys], its)
            step.end_layer(layer)
        step.finish()


def check_one_pass(model, kv):
    """One pass of training computes what is served token by token."""
    model = random_model(ModelConfig(**{**SHAPE, **model}))
    words = torch.randint(1, 29, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        exact = model(words)
        model.trained_kv = kv
        one_shot, cache = model(words), model.new_cache(2, 40, serve(kv))
        served = torch.cat([model(words[:, i : i + 1], cache=cache) for i in range(40)], 1)
        assert (one_shot - served).abs().max() < 1e-10
        assert (one_shot - exact).abs().max() > 1e-3, "rounding changes something"
        packed = words.clone()
        packed[0, 17] = packed[1, 0] = packed[1, 9] = 0
        together = model.compute_logits(model.hidden_states(packed, document_start=0))
        for row, start, end in [(0, 0, 17), (0, 17, 40), (1, 0, 9), (1, 9, 40)]:
            alone = model(packed[row : row + 1, start:end])[0]
            assert (together[row, start:end] - alone).abs().max() < 1e-10


def check_gradients(kv, window, seen_by):
    """They are those of a float64 model of the scheme.

    In it rounding is a constant that is added, and each query has keys of its own.

    Args:
        seen_by: a function of kv, a query's place, a part (tokens, heads, size) and its number that
            returns the part as the query reads it.
    """
    count, shape = 21, {"attention_pattern": "L" if window else "G", "window": window}
    config = ModelConfig(**{**SHAPE, "n_layer": 1, **shape})
    inputs = [draw(seed, 1, heads, count, 8) for seed, heads in ((1, 4), (2, 2), (3, 2))]
    weights = draw(4, 1, 4, count, 8)

    ours = [part.clone().requires_grad_() for part in inputs]
    one_pass = begin_one_shot_pass(config, kv, count, torch.device("cpu"))
    one_pass.write_kv(0, *ours[1:])
    context = one_pass.read_kv(0)
    k, v = context.parts
    out = attend(ours[0], Keys(k), v, context=context, layer=config.layers[0], sink=None)
    (out * weights).sum().backward()

    exact = [part.double().requires_grad_() for part in inputs]
    total = 0.0
    for place in range(count):
        first = max(0, place - (window or count) + 1)
        read = []
        for index, part in enumerate(exact[1:]):
            plain = part.detach()[0].transpose(0, 1).numpy()
            rounded = torch.from_numpy(seen_by(kv, place, plain, index)).transpose(0, 1)[None]
            read.append((part + (rounded - part).detach())[:, :, first : place + 1])
        k, v = (part.repeat_interleave(2, 1) for part in read)
        scores = (exact[0][:, :, place : place + 1] @ k.mT / 8**0.5).softmax(-1)
        total = total + (scores @ v * weights[:, :, place : place + 1]).sum()
    total.backward()
    for one, other in zip(ours, exact, strict=True):
        assert other.grad.abs().max() > 0.1
        assert (one.grad - other.grad).abs().max() < 2e-6 * other.grad.abs().max() + 1e-6
