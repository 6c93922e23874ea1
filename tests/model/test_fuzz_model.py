"""Cached logits equal the dense reference's for random layouts, chunks, rows and tie rules."""

from dataclasses import replace

import pytest
import torch

from kvlab.model import attention, generate
from kvlab.model.kernels.cpu_kernel import use_plain_code
from tests.studies import fuzz_model
from tests.studies.fuzz_model import TOLERANCE, draw_case, find_tolerance, make_model, run_case
from tests.support.random_model import random_model
from tests.support.reference_model import ReferenceModel, read_weights

CASES, PLAIN_CASES, PARTS = 160, 40, 4
ONE_SHOT_CASES = 24
MORE_CASES = 480


def check_cases(first, last, step=1):
    for number in range(first, last, step):
        case = draw_case(number)
        assert run_case(case) <= find_tolerance(case), case


def test_without_attention_a_case_in_bfloat16_disagrees(monkeypatch):
    cases = [case for case in map(draw_case, range(CASES)) if case.dtype == torch.bfloat16]
    assert len(cases) > 3
    zeros = lambda q, _k, v, **_: q.new_zeros(*q.shape[:3], v.shape[-1])  # noqa: E731
    monkeypatch.setattr(attention, "attend", zeros)
    for case in cases:
        assert run_case(case) > find_tolerance(case), case


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 5), (torch.bfloat16, 1)])
def test_on_a_gpu_errors_are_as_large_as_stated_and_no_larger(monkeypatch, dtype, factor):
    case = replace(draw_case(0), dtype=dtype)
    monkeypatch.setattr(fuzz_model, "draw_case", lambda _number: case)
    arguments = ["fuzz_model", "--cases", "2", "--device", "cuda"]
    monkeypatch.setattr("sys.argv", arguments)
    for share, code in ((0.99, 0), (1.01, 1), (float("nan"), 1)):
        error = share * factor * TOLERANCE[dtype]
        monkeypatch.setattr(fuzz_model, "run_case", lambda *_, error=error: error)
        assert fuzz_model.main() == code


@pytest.mark.parametrize("part", range(PARTS))
def test_every_logit_agrees_with_the_reference(part):
    check_cases(part, CASES, PARTS)


def test_every_logit_agrees_without_the_cpu_kernels():
    with use_plain_code():
        check_cases(0, PLAIN_CASES)


def test_one_shot_logits_agree_with_the_reference():
    for number in range(ONE_SHOT_CASES):
        case = replace(draw_case(number), dtype=torch.float64)
        model, config = make_model(case), case.config
        draw = torch.Generator().manual_seed(number)
        text = torch.randint(config.vocab_size, (1, config.block_size), generator=draw)
        reference = ReferenceModel(config, read_weights(model), list(config.kv_owners))
        expected = torch.from_numpy(reference.logits(text[0].tolist()))
        with torch.inference_mode():
            assert (model(text)[0] - expected).abs().max() < TOLERANCE[case.dtype], case


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_every_logit_of_many_more_cases_agrees(code_path):
    first, last = (CASES, MORE_CASES) if code_path == "kernels" else (PLAIN_CASES, MORE_CASES // 2)
    check_cases(first, last)


@pytest.mark.parametrize("number", [0, 9])
def test_passes_and_steps_are_compiled_whole(number, monkeypatch):
    """One graph each, which runs as it was traced: a part that is not traced raises an error."""
    case = draw_case(number)
    config, serving = case.config, case.serving
    model = random_model(config).eval()
    tokens = torch.arange(2 * config.block_size).view(2, -1) % config.vocab_size
    model.prepare_positions(config.block_size)
    options = {"backend": "eager", "fullgraph": True, "dynamic": False}
    torch.compiler.reset()
    trained = torch.compile(model.hidden_states, **options)(tokens)
    assert (trained - model.hidden_states(tokens)).abs().max() < 1e-9
    step = torch.compile(generate._run_step, **options)
    monkeypatch.setattr(generate, "_compile_step", lambda: step)
    rows = []
    with torch.inference_mode():
        for compiles in (True, False):
            cache = model.new_cache(2, config.block_size, serving)
            decoder = generate.StaticDecoder(model, cache, compiles=compiles)
            rows.append(torch.stack([decoder(tokens[:, i]).clone() for i in range(4)]))
    assert (rows[0] - rows[1]).abs().max() < (1e-9 if serving.kv_dtype == "model" else 1e-4)
