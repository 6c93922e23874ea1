"""A store that holds one trained trial, without training it."""

import torch

from kvlab.model import GPT
from kvlab.spec import Experiment
from kvlab.train.weights import FINAL, write_tensors
from kvlab.trial import Store, Trial
from kvlab.trial.provenance import DataProvenance, Machine
from kvlab.trial.result import Measured, result_document


def lively(config):
    """A model whose attention matters, so that a wrong cache shows."""
    model = GPT(config, seed=1)
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def experiment(model, **sections):
    return Experiment(
        name="tiny",
        model=model,
        data={"tokenizer": "bytes"},
        benchmark={"prompt_tokens": 4, "new_tokens": 4},
        **sections,
    )


def write_trial(folder, shape, model) -> str:
    """Records ``model`` as a finished trial of the store ``folder``; its id."""
    made, store = Trial.of(experiment(shape), "text", 0), Store(folder)
    directory = store.training_directory(made.training_id)
    write_tensors(directory / FINAL, dict(model.named_parameters()))
    (directory / "training.json").write_text("{}")
    measured = Measured(
        {"loss": 1.0},
        {"train_loss": [], "validation_loss": []},
        {"steps": 0},
        Machine("cpu", 1),
        DataProvenance("text", "0" * 64, "none", "bytes"),
    )
    store.write_result(result_document(made, "done", {}, measured=measured))
    return made.id
