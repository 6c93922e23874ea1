"""Training on packed documents that do not see each other."""

import numpy as np
import pytest
import torch

from kvlab.data.batches import get_training_batch
from kvlab.train.loop import train
from kvlab.train.train_step import TrainStepper
from tests.support.tiny_training import dataset, experiment, model

DATA = dataset()
DATA.train[::11] = 256
OPEN = experiment()
MASKED = OPEN.model_copy(
    update={"data": OPEN.data.model_copy(update={"mask_documents": True})}
)  # fmt: skip


@pytest.mark.usefixtures("code_path")
def test_the_loss_of_a_step_is_the_mean_over_documents_alone():
    stepper = TrainStepper(model(MASKED), DATA, MASKED, seed=0)
    reference, losses = model(MASKED), []
    x, y = get_training_batch(DATA.train, seed=0, step=0, batch_size=4, block_size=16)
    for tokens, targets in zip(x, y, strict=True):
        document = []
        for token, target in zip(tokens, targets, strict=True):
            document = [int(token)] if token == 256 else [*document, int(token)]
            logits = reference(torch.tensor([document]))[0, -1].detach().log_softmax(-1)
            losses.append(-float(logits[int(target)]))
    assert stepper.step(0) == pytest.approx(np.mean(losses), abs=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("masked", [False, True])
def test_hybrid_training_compiled_in_bfloat16_on_cuda_is_the_cpus(tmp_path, masked):
    shape = {
        "block_size": 256, "n_layer": 4, "n_head": 4, "n_kv_head": 1, "n_embd": 64,
        "position": "rope", "attention_pattern": "GLLL", "window": 40,
    }  # fmt: skip
    steps = {"tokens": 1024 * 24, "batch_tokens": 1024, "evaluate_tokens": 512}
    curves = []
    for device, fast in (("cpu", {}), ("cuda", {"precision": "bfloat16", "compile": True})):
        of = experiment(shape, {**steps, **fast})
        of = of.model_copy(update={"data": (MASKED if masked else OPEN).data})
        record = train(model(of), DATA, of, seed=0, directory=tmp_path / device, device=device)
        curves.append(record.validation_curve)
    for a, b in zip(*curves, strict=True):
        assert a == pytest.approx(b, abs=5e-2)
