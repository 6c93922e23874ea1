"""Trainings whose linear layers multiply in int8: resumed, compiled, recorded."""

import pytest
import torch

from kvlab.model.kernels.int8 import INT8_KERNELS, Int8Linear, select_int8_kernel
from kvlab.model.kernels.linear import Linear
from kvlab.train.loop import train
from kvlab.train.train_step import TrainStepper
from kvlab.train.training_record import load_training_record
from tests.support.tiny_training import dataset, experiment, model

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
    assert exact.int8 is None


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


def test_a_compiled_layer_is_one_graph_and_the_same_layer():
    layer = Linear(16, 24)
    layer.int8 = Int8Linear(True, True, True, select_int8_kernel(torch.device("cpu")))
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
    shape = {"position": "rope", "kv": {"latent": 8, "rotary": 4}}
    of = experiment(shape, {"int8": ["grad_weight"], "tokens": 64})
    record = run(of, tmp_path)
    layers = len(model(of).linear_layers())
    assert len(calls) == layers, "one step of one pass, and no product of the validation"
    said = {"kernel": kernel, "products": ["grad_weight"], "layers": layers, "padded": []}
    assert record.int8 == load_training_record(tmp_path).int8 == said


def test_the_record_says_what_cublas_multiplies_in_place_of_a_shape_that_it_refuses():
    of = experiment({"n_embd": 20, "ffn_dim": 24}, {"int8": ["output", "grad_weight"]})
    stepper = TrainStepper(model(of), DATA, of, 0)
    stepper.loss.int8 = type(stepper.loss.int8)(True, False, True, "cublas")
    padded = stepper.describe_int8()["padded"]
    assert ["output", "blocks.0.mlp.up", [64, 20, 24], [64, 24, 24]] in padded
    assert ["grad_weight", "blocks.1.mlp.down", [20, 64, 24], [20, 64, 24]] not in padded
    assert all(own != multiplied for *_, own, multiplied in padded)
