"""Documents packed into a row are computed as if each stood alone."""

import pytest
import torch

from kvlab.model import GPT
from kvlab.model.loss import summed_loss
from kvlab.spec import ModelConfig

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
    found = model.hidden_states(tokens, document_start=START)
    for row, place, alone in pieces(tokens):
        assert (found[row, place] - model.hidden_states(alone)[0]).abs().max() < 1e-10
    if shape["position"] != "none":
        assert (found - model.hidden_states(tokens)).abs().max() > 0.1, "the mask changes something"


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_the_documents_alone(shape):
    packed_model, alone_model, tokens = make(shape), make(shape), packed()
    targets = tokens.roll(-1, 1)
    hidden = packed_model.hidden_states(tokens, document_start=START)
    summed_loss(hidden, packed_model.lm_head.weight, targets).backward()
    for row, place, alone in pieces(tokens):
        wanted = targets[row : row + 1, place]
        summed_loss(alone_model.hidden_states(alone), alone_model.lm_head.weight, wanted).backward()
    for ours, theirs in zip(packed_model.parameters(), alone_model.parameters(), strict=True):
        assert (ours.grad - theirs.grad).abs().max() < 1e-9


def test_a_cache_holds_one_document_a_row():
    model = make(SHAPES[0])
    with pytest.raises(ValueError, match="give each document its own row"):
        model.hidden_states(packed(), model.new_cache(3, 40), document_start=START)
