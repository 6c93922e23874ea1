"""Upper layers that only read run on a prompt's last token alone, and its logits stay."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kvlab.layout import KVLayout
from kvlab.layout.roofline_model import prefill_flops
from kvlab.model.generate import prefill
from kvlab.spec import ModelConfig
from tests.studies.fuzz_model import draw_case, make_model
from tests.support.random_model import random_model

CASES = 80


def readers(case):
    """Return how many upper layers only read, in a case that the spec does not refuse."""
    return case.config.n_layer - KVLayout.of(case.config, case.serving).first_reader


def list_cases():
    """Return random models, caches and chunks, most of them with layers that only read."""
    cases = [replace(draw_case(number), dtype=torch.float64) for number in range(2 * CASES)]
    skipping = [case for case in cases if readers(case)]
    return skipping[: CASES * 3 // 4] + [case for case in cases if not readers(case)][: CASES // 4]


def test_logits_and_caches_are_those_of_a_whole_pass():
    found = 0
    for case in list_cases():
        model, rows = make_model(case), len(case.chunks[0])
        caches = [model.new_cache(rows, 64, case.serving) for _ in range(2)]
        for added in case.chunks:
            tokens = torch.randint(0, case.config.vocab_size, (rows, max(added)))
            lengths = added if case.is_ragged else None
            with torch.inference_mode():
                whole = model(tokens, cache=caches[0], lengths=lengths)
                last = prefill(model, tokens, caches[1], lengths)
            for row, count in enumerate(added):
                if count:
                    assert (last[row] - whole[row, count - 1]).abs().max() < 1e-10, case
        for one, other in zip(caches[0].tensors, caches[1].tensors, strict=True):
            assert torch.equal(one, other), case
        found += bool(readers(case))
    assert found > CASES // 3


@pytest.mark.parametrize("sharing", ["trailing:3", "adjacent:2", "none"])
def test_a_prompt_takes_the_flops_of_its_formula(sharing):
    """Products of matrices, as torch counts them; attention's own kernels are added by hand."""
    config = ModelConfig(
        vocab_size=61, block_size=32, n_layer=4, n_head=2, n_kv_head=1, n_embd=24,
        kv_sharing=sharing, position="rope",
    )  # fmt: skip
    model, tokens = random_model(config), torch.arange(20)[None]
    layout = KVLayout.of(config)
    assert layout.first_reader == {"trailing:3": 1, "adjacent:2": 3, "none": 4}[sharing]
    scores = [2 * 20 * (20 if layer < layout.first_reader else 1) * 24 * 2 for layer in range(4)]
    for cache in (None, model.new_cache(1, 20)):
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            prefill(model, tokens, cache)
        linear = sum(
            flops
            for operation, flops in counter.get_flop_counts()["Global"].items()
            if str(operation) in ("aten.mm", "aten.addmm")
        )
        assert linear + sum(scores) == prefill_flops(config, 20)
