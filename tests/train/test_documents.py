"""Training on packed documents that do not see each other."""

import numpy as np
import pytest
import torch

from kvlab.data import training_batch
from kvlab.errors import Stopped, StoreError
from kvlab.spec import Experiment, SpecError
from kvlab.train import train
from kvlab.train.stepper import Stepper
from kvlab.trial.fingerprint import training_fingerprint
from tests.train.small import dataset, experiment, model

DATA = dataset()
DATA.train[::11] = 256
OPEN = experiment()
MASKED = OPEN.model_copy(
    update={"data": OPEN.data.model_copy(update={"mask_documents": True})}
)  # fmt: skip


def test_the_loss_of_a_step_is_the_mean_over_documents_alone():
    stepper = Stepper(model(MASKED), DATA, MASKED, seed=0)
    reference, losses = model(MASKED), []
    x, y = training_batch(DATA.train, seed=0, step=0, batch_size=4, block_size=16)
    for tokens, targets in zip(x, y, strict=True):
        document = []
        for token, target in zip(tokens, targets, strict=True):
            document = [int(token)] if token == 256 else [*document, int(token)]
            logits = reference(torch.tensor([document]))[0, -1].detach().log_softmax(-1)
            losses.append(-float(logits[int(target)]))
    assert stepper.step(0) == pytest.approx(np.mean(losses), abs=1e-5)


def test_no_run_goes_on_from_one_with_another_mask(tmp_path):
    asked = iter(range(9))
    with pytest.raises(Stopped):
        train(model(OPEN), DATA, OPEN, seed=0, directory=tmp_path,
              should_stop=lambda: next(asked) == 5)  # fmt: skip
    with pytest.raises(StoreError, match="belongs to another training"):
        train(model(MASKED), DATA, MASKED, seed=0, directory=tmp_path)


def test_the_mask_is_part_of_what_names_the_weights_where_there_is_one():
    assert training_fingerprint(OPEN, "t", 0) != training_fingerprint(MASKED, "t", 0)
    assert "mask_documents" not in OPEN.data.identity()


def test_loss_by_tokens_seen_is_refused_with_it():
    facts = OPEN.model_dump()
    facts["data"]["mask_documents"] = facts["evaluation"]["positions"] = True
    with pytest.raises((SpecError, ValueError), match="mask_documents hides some"):
        Experiment.model_validate(facts)
