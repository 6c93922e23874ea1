"""A store that holds one trained trial, without training it."""

import torch

from kvlab.fs.sealed_files import seal_file, write_sealed_json
from kvlab.model import GPT
from kvlab.store import Store
from kvlab.store.provenance import DataProvenance, Machine
from kvlab.store.result import TrialMeasurements
from kvlab.train.tensor_files import FINAL_WEIGHTS, write_tensors
from kvlab.trial import Trial
from kvlab.trial.trial import build_result
from tests.support.tiny_training import experiment


def make_random_model(config):
    """Return a model with weights so large that an error in its attention or cache shows."""
    model = GPT(config, seed=1)
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def write_trained_trial(folder, shape, model) -> str:
    """Record ``model`` as a finished trial of the store ``folder``; return the trial's id."""
    made, store = Trial.of(experiment(shape), "text", 0), Store(folder)
    directory = store.training_directory(made.training_id)
    write_tensors(directory / FINAL_WEIGHTS, dict(model.named_parameters()))
    files = {FINAL_WEIGHTS.as_posix(): seal_file(directory / FINAL_WEIGHTS)}
    write_sealed_json(directory / "training.json", {"files": files})
    measured = TrialMeasurements(
        {"loss": 1.0}, {"train_loss": [], "validation_loss": []}, {"steps": 0}, Machine("cpu", 1),
        DataProvenance("text", "0" * 64, "none", "bytes"),
    )  # fmt: skip
    store.write_result(build_result(made, "done", {}, measured=measured))
    return made.id
