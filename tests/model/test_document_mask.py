"""Documents packed into a row are computed as if each stood alone, by every backend."""

import pytest
import torch

from kvlab.cache import DocumentMask
from kvlab.model import GPT
from kvlab.model.attention_backends import BACKENDS
from kvlab.model.loss import summed_loss
from kvlab.spec import ModelConfig
from tests.model.test_attention_backends import naive

START = 40
LENGTHS = [(3, 1, 13, 7, 16), (40,), (1, 1, 30, 8)]
"""Tokens of each document in three rows of 40."""

SHAPES = [
    {"position": "learned"},
    {"position": "rope", "n_kv_head": 2, "attention_pattern": "GL", "window": 5},
    {"position": "none", "kv_sharing": "adjacent:2", "n_kv_head": 1},
]


def packed():
    """Rows (3, 40); the first document of the second row began in the window before."""
    torch.manual_seed(2)
    tokens = torch.randint(0, START, (3, 40))
    for row, lengths in enumerate(LENGTHS):
        at = 0
        for length in lengths:
            tokens[row, at] = START
            at += length
    tokens[1, 0] = 7
    return tokens


def pieces(tokens):
    for row, lengths in enumerate(LENGTHS):
        at = 0
        for length in lengths:
            yield row, slice(at, at + length), tokens[row : row + 1, at : at + length]
            at += length


def make(shape, dtype=torch.float64):
    sizes = {"vocab_size": 41, "block_size": 40, "n_layer": 4, "n_head": 4, "n_embd": 32}
    model = GPT(ModelConfig(**{**sizes, **shape}), seed=1, dtype=dtype)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.mark.parametrize("shape", SHAPES)
def test_each_document_is_computed_as_if_alone(shape):
    model, tokens = make(shape), packed()
    found = model.hidden(tokens, document_start=START)
    for row, place, alone in pieces(tokens):
        assert (found[row, place] - model.hidden(alone)[0]).abs().max() < 1e-10
    if shape["position"] != "none":
        assert (found - model.hidden(tokens)).abs().max() > 0.1, "the mask changes something"


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_the_documents_alone(shape):
    packed_model, alone_model, tokens = make(shape), make(shape), packed()
    targets = tokens.roll(-1, 1)
    hidden = packed_model.hidden(tokens, document_start=START)
    summed_loss(hidden, packed_model.lm_head.weight, targets).backward()
    for row, place, alone in pieces(tokens):
        wanted = targets[row : row + 1, place]
        summed_loss(alone_model.hidden(alone), alone_model.lm_head.weight, wanted).backward()
    for ours, theirs in zip(packed_model.parameters(), alone_model.parameters(), strict=True):
        assert (ours.grad - theirs.grad).abs().max() < 1e-9


def parted(length):
    torch.manual_seed(4)
    tokens = torch.randint(0, 30, (2, length))
    tokens[0, [9, 10, length // 2]] = 31
    return DocumentMask(tokens, 31)


def alone(q, k, v, window, ids):
    """Document after document through the definition of attention."""
    rows = []
    for row in range(len(q)):
        parts = []
        for document in ids[row].unique():
            here = ids[row] == document
            parts.append(naive(*(x[row : row + 1, :, here] for x in (q, k, v)), window))
        rows.append(torch.cat(parts, 2))
    return torch.cat(rows)


CASES = [(name, n, w) for name in ("sdpa", "kept") for n in (20, 300) for w in (None, 6, 150)]
CASES += [("blocked", n, w) for n in (20, 300) for w in (6, 150)]


@pytest.mark.parametrize(("name", "length", "window"), CASES)
def test_backends_agree_with_documents_alone_forward_and_gradient(name, length, window):
    documents = parted(length)
    shapes = [(2, heads, length, 8) for heads in (4, 2, 2)]
    ours = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    weight = torch.randn(shapes[0], dtype=torch.float64)
    out = BACKENDS[name](*ours, window, documents)
    wanted = alone(*theirs, window, documents.ids)
    (out * weight).sum().backward()
    (wanted * weight).sum().backward()
    assert (out - wanted).abs().max() < 1e-12
    for left, right in zip(ours, theirs, strict=True):
        assert (left.grad - right.grad).abs().max() < 1e-12


@pytest.mark.parametrize("window", [None, 40])
def test_flex_agrees_forward(window):
    documents = parted(256)
    q, k, v = (torch.randn(2, heads, 256, 16) for heads in (4, 2, 2))
    with torch.inference_mode():
        wanted = BACKENDS["sdpa"](q, k, v, window, documents)
        assert (BACKENDS["flex"](q, k, v, window, documents) - wanted).abs().max() < 1e-5


def test_a_cache_holds_one_document_a_row():
    model = make(SHAPES[0])
    with pytest.raises(ValueError, match="give each document its own row"):
        model.hidden(packed(), model.new_cache(3, 40), document_start=START)
