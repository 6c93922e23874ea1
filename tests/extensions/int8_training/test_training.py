"""A training with int8 products, and its section of a report."""

from pathlib import Path

import pytest
import torch

from kvlab.extensions.int8_training.int8 import INT8_KERNELS, Int8Linear, select_int8_kernel
from kvlab.model.kernels.linear import Linear
from kvlab.train.loop import train
from kvlab.train.train_step import TrainStepper
from kvlab.train.training_record import load_training_record
from tests.extensions.int8_training.records import RECORD
from tests.layout.test_training_memory import check_peak
from tests.report.reading import load, markdown
from tests.support.golden import check_golden
from tests.support.tiny_training import dataset, experiment, model
from tests.train.test_checkpoint import check_resumed

DATA = dataset()
ALL = {"int8": ["output", "grad_input", "grad_weight"]}


def run(of, directory):
    return train(model(of), DATA, of, seed=0, directory=directory)


def losses(record):
    return [point[2] for point in record.train_curve]


def test_int8_products_change_a_training_a_little(tmp_path):
    exact = run(experiment(), tmp_path / "float")
    coded = run(experiment(training=ALL), tmp_path / "int8")
    assert losses(coded) != losses(exact)
    assert losses(coded) == pytest.approx(losses(exact), abs=0.05)
    assert exact.products == {"int8": None}


def test_microbatches_change_the_gradient_of_the_weight_alone():
    """Its scales are those of a pass; each row of the other products has its own."""
    for products, largest in ((["output", "grad_input"], 1e-5), (ALL["int8"], 0.02)):
        of = [
            experiment(training={"int8": products}, resources={"microbatch_tokens": tokens})
            for tokens in (16, 64)
        ]
        gradients = []
        for one in of:
            trained = model(one)
            TrainStepper(trained, DATA, one, 0).accumulate_gradient(0)
            gradients.append(torch.cat([p.grad.flatten() for p in trained.parameters()]))
        change = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
        assert change < largest
    assert change > 1e-4


@pytest.mark.parametrize("kernel", sorted({select_int8_kernel(torch.device("cpu")), "float32"}))
def test_a_compiled_layer_is_one_graph_and_the_same_layer(kernel):
    layer = Linear(16, 24)
    layer.products = Int8Linear(tuple(ALL["int8"]), kernel)
    x, results = torch.randn(2, 20, 16), []
    for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        inputs = x.clone().requires_grad_()
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = call(inputs)
        out.float().square().sum().backward()
        results.append((out, inputs.grad, layer.weight.grad, layer.bias.grad))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_the_record_says_which_products_ran_in_int8_and_by_which_kernel(tmp_path, monkeypatch):
    kernel = select_int8_kernel(torch.device("cpu"))
    multiply, calls = INT8_KERNELS[kernel], []
    monkeypatch.setitem(INT8_KERNELS, kernel, lambda a, b: calls.append(1) or multiply(a, b))
    of = experiment(training={"int8": ["grad_weight"], "tokens": 64})
    record = run(of, tmp_path)
    layers = len(model(of).linear_layers())
    assert len(calls) == layers, "one step of one pass, and no product of the validation"
    said = {"kernel": kernel, "products": ["grad_weight"], "layers": layers}
    assert record.products == load_training_record(tmp_path).products == {"int8": said}


def test_it_resumes_bitwise(tmp_path):
    shape = {"n_kv_head": 1, "position": "rope", "attention_pattern": "GL", "window": 5}
    check_resumed(tmp_path, {"training": {"precision": "bfloat16", **ALL}, "model": shape})


def test_peak_is_near_a_profile(tmp_path):
    check_peak(tmp_path, {"n_layer": 1}, "float32", None, ALL)


def test_the_section_is_the_golden_one(tmp_path):
    said = markdown(load(RECORD, tmp_path, "quantized-training"))
    check_golden(Path(__file__).with_name("report.txt"), said)
