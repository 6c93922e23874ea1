"""What every attention backend must do. A member's tests inherit `AttentionBackendContract`."""

import math

import pytest
import torch

from kvlab.cache import DocumentMask
from kvlab.model.attention_backends import BACKENDS
from kvlab.model.causal_mask import CausalMask

N_HEAD, HEAD_DIM = 4, 8
WHOLE_PASS = (
    *((17, window) for window in (None, 1, 5, 400)),
    *((130, window) for window in (None, 9, 70, 130)),
    *((300, window) for window in (None, 1, 70, 130, 200, 299, 400)),
)
WITH_PAST = ((5, 30, None), (5, 30, 7), (140, 200, 70), (1, 40, 16))


def attend_by_definition(q, k, v, window, sink=None, sink_tokens=0):
    """Attention as one dense softmax; queries end with the last key."""
    past = k.shape[2] - q.shape[2]
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    far = window or k.shape[2]
    index = torch.arange(k.shape[2])
    distance = past + index[: q.shape[2], None] - index
    visible = (distance >= 0) & ((distance < far) | (index < sink_tokens))
    weights = scores.exp() * visible
    none = 0.0 if sink is None else sink.exp()[:, None, None]
    return weights / (weights.sum(-1, keepdim=True) + none) @ v


def attend_each_document(q, k, v, window, ids, sink=None, sink_tokens=0):
    """Attention of one document after another."""
    rows = []
    for row in range(len(q)):
        outputs = []
        for document in ids[row].unique():
            tokens = ids[row] == document
            parts = (x[row : row + 1, :, tokens] for x in (q, k, v))
            outputs.append(attend_by_definition(*parts, window, sink, sink_tokens))
        rows.append(torch.cat(outputs, 2))
    return torch.cat(rows)


def random_documents(length):
    """Two rows, the first of four documents and the second of one."""
    torch.manual_seed(4)
    tokens = torch.randint(0, 30, (2, length))
    tokens[0, [9, 10, length // 2]] = 31
    return DocumentMask(tokens, 31)


class AttentionBackendContract:
    """Give `backend`, a name in `BACKENDS`, and what it serves on CPU."""

    backend: str
    whole_pass = WHOLE_PASS
    """(tokens, window) of a pass without a past."""
    with_past: tuple = WITH_PAST
    """(queries, keys, window) of a pass that continues a cache."""
    dtype, tolerance = torch.float64, 1e-12
    has_gradient = True

    @pytest.fixture
    def attend(self):
        return BACKENDS[self.backend].attend

    def inputs(self, queries, keys, kv_heads, v_width=HEAD_DIM):
        torch.manual_seed(0)
        shapes = (
            (N_HEAD, queries, HEAD_DIM),
            (kv_heads, keys, HEAD_DIM),
            (kv_heads, keys, v_width),
        )
        return [
            torch.randn(2, *shape, dtype=self.dtype, requires_grad=self.has_gradient)
            for shape in shapes
        ]

    def agree(self, attend, reference, inputs):
        copies = [t.detach().double().requires_grad_(self.has_gradient) for t in inputs]
        with torch.set_grad_enabled(self.has_gradient):
            out, expected = attend(*inputs), reference(*copies)
        assert out.shape == expected.shape
        assert (out - expected).abs().max() < self.tolerance
        if not self.has_gradient:
            return
        weight = torch.randn(out.shape, dtype=self.dtype)
        (out * weight).sum().backward()
        (expected * weight).sum().backward()
        for ours, theirs in zip(inputs, copies, strict=True):
            assert (ours.grad - theirs.grad).abs().max() < self.tolerance

    def agree_by_definition(self, attend, inputs, window, sink_tokens=0, documents=None):
        """Compare what a backend computes of (q, k, v) and a sink with the definition."""
        mask = CausalMask(window, sink_tokens, documents)

        def attend_masked(q, k, v, sink=None):
            return attend(q, k, v, mask, sink)

        def define(q, k, v, sink=None):
            if documents is None:
                return attend_by_definition(q, k, v, window, sink, sink_tokens)
            return attend_each_document(q, k, v, window, documents.ids, sink, sink_tokens)

        self.agree(attend_masked, define, inputs)

    @pytest.mark.parametrize("kv_heads", [1, 2, 4])
    def test_a_pass_agrees_with_the_definition(self, attend, kv_heads):
        whole = [(length, length, window) for length, window in self.whole_pass]
        for queries, keys, window in (*whole, *self.with_past):
            self.agree_by_definition(attend, self.inputs(queries, keys, kv_heads), window)

    def test_values_may_be_wider_or_narrower_than_keys(self, attend):
        for (length, window), v_width in zip(self.whole_pass[::4], (4, 24) * 2, strict=False):
            self.agree_by_definition(attend, self.inputs(length, length, 2, v_width), window)

    def test_each_document_attends_as_if_alone(self, attend):
        for length, window in self.whole_pass[::2]:
            inputs, documents = self.inputs(length, length, 2), random_documents(length)
            self.agree_by_definition(attend, inputs, window, documents=documents)

    @pytest.mark.parametrize(("has_sink", "sink_tokens"), [(False, 2), (True, 0), (True, 40)])
    def test_sinks_agree_with_the_definition(self, attend, has_sink, sink_tokens):
        for length, window in self.whole_pass[-5::2]:
            count = sink_tokens if window else 0
            for documents in (None, random_documents(length)):
                inputs = self.inputs(length, length, 2)
                if has_sink:
                    sink = torch.randn(N_HEAD, dtype=self.dtype, requires_grad=self.has_gradient)
                    inputs.append(sink)
                self.agree_by_definition(attend, inputs, window, count, documents)

    def test_a_sink_of_minus_infinity_is_none(self, attend):
        length, window = self.whole_pass[-1]
        inputs, none = self.inputs(length, length, 2), torch.full((N_HEAD,), -math.inf)
        with torch.no_grad():
            mask = CausalMask(window)
            difference = attend(*inputs, mask, none) - attend(*inputs, mask)
        assert difference.abs().max() <= min(self.tolerance, 1e-6)
