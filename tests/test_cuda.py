"""What kvlab computes on a CUDA device, and how its trials share one: beside the claims of `make gpu`,
which runs these first."""

import importlib.util

import pytest
import torch

from kvlab.errors import Stopped
from kvlab.layout.gpu_sharing import CONTEXT_BYTES
from kvlab.model import attention_backends
from kvlab.model.attention_backends import BACKENDS, record_kernels, scaled_dot_product
from kvlab.model.causal_mask import CausalMask
from kvlab.train.loop import train
from tests.studies.gpu_page import (
    BROKEN,
    DECODED,
    DECODED_TOLERANCE,
    Setting,
    SmallSweep,
    compare_decoders,
)
from tests.support.tiny_training import dataset, experiment, model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")
DEVICE = "cuda"
LACKS_REPORT = "no report: "
"""Where what draws it is not installed."""


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("name", [name for name in DECODED if "compiled" not in name])
def test_a_captured_step_that_lacks_something_is_noticed(name, broken):
    tolerance = DECODED_TOLERANCE[DECODED[name][0]]
    assert compare_decoders(Setting(DEVICE, is_tiny=True), name, broken) > 3 * tolerance


@pytest.mark.parametrize("has_mask", [False, True])
def test_queries_that_share_heads_need_no_square_of_memory_in_float32(has_mask):
    queries = torch.randn(2, 12, 2048, 64, device=DEVICE)
    k, v = torch.randn(2, 2, 1, 2048, 64, device=DEVICE)
    mask = torch.ones(2048, 2048, dtype=torch.bool, device=DEVICE).tril() if has_mask else None
    exact = scaled_dot_product(*(t.double() for t in (queries, k, v)), mask, is_causal=not has_mask)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with record_kernels() as kernels:
        out = scaled_dot_product(queries, k, v, mask, is_causal=not has_mask)
    assert "math" not in kernels
    assert torch.cuda.max_memory_allocated() - before < 2 * 12 * 2048 * 2048 * 4 / 2
    assert (out - exact).abs().max() < 1e-3


def test_windows_of_more_than_eight_shapes_stay_compiled(caplog):
    torch.compiler.reset()
    attention_backends._compile_flex.cache_clear()
    mask = CausalMask(40)
    for length in range(128, 128 + 10 * 64, 64):
        x = torch.randn(1, 2, length, 64, device=DEVICE, requires_grad=True)
        name = attention_backends.select_backend(x, x, x, mask)
        assert name == "flex"
        with record_kernels() as kernels:
            out = BACKENDS[name].attend(x, x, x, mask)
        assert kernels == {"flex"}
        assert (out - BACKENDS["sdpa"].attend(x, x, x, mask)).abs().max() < 2e-3
    assert not [record for record in caplog.records if record.name.startswith("kvlab")]


def test_a_training_that_was_stopped_goes_on(tmp_path):
    """From the checkpoint that a thread writes beside the training, in the order of the data."""
    of = experiment(training={"checkpoint_every": 2})
    options = {"seed": 0, "device": DEVICE}
    whole = train(model(of), dataset(), of, directory=tmp_path / "whole", **options)
    calls = iter(range(100))
    with pytest.raises(Stopped):
        train(model(of), dataset(), of, directory=tmp_path / "parts",
              should_stop=lambda: next(calls) >= 4, **options)  # fmt: skip
    parts = train(model(of), dataset(), of, directory=tmp_path / "parts", **options)
    assert parts.resumed_from == [5]
    for a, b in zip(whole.validation_curve, parts.validation_curve, strict=True):
        assert a == pytest.approx(b, abs=1e-3)


def test_a_trial_that_does_not_fit_goes_on_with_a_smaller_microbatch(tmp_path):
    """It may have 2 GiB of the device, and all rows of a step at once take several times that."""
    total = torch.cuda.get_device_properties(0).total_memory
    share = round((2 * 2**30 + CONTEXT_BYTES) / total, 3)
    sweep = SmallSweep(tmp_path, f"gpus: {share}, microbatch_tokens: 131072")
    sweep.write(width=256, block=256, batch=131_072, tokens=262_144)
    output = sweep.submit("--no-smoke")
    assert [one["status"] for one in sweep.results] == ["done", "done"], output
    for one in sweep.results:
        resources = one["experiment"]["resources"]
        assert resources["microbatch_tokens"] < 131_072 or resources["gpus"] == 1.0, output


@needs_ray
def test_trials_share_the_device_by_what_they_are_measured_to_need(tmp_path):
    sweep = SmallSweep(tmp_path, "gpus: auto", seeds=2, executor="ray").write(width=64)
    output = sweep.submit()
    assert [one["status"] for one in sweep.results] == ["done"] * 4, output
    assert all(one["experiment"]["resources"]["gpus"] < 1 for one in sweep.results), output
    assert sweep.has_report or LACKS_REPORT in output
