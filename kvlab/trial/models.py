"""A model to use, by what a person calls it: a trial's id, a checkpoint folder, or a preset."""

import re
from dataclasses import dataclass
from pathlib import Path

from kvlab.errors import UsageError
from kvlab.model import GPT
from kvlab.spec import Experiment, ModelConfig, ServingConfig
from kvlab.spec.presets import PRESETS
from kvlab.train import load_weights
from kvlab.trial.record import Store

_REPOSITORIES = {name: f"openai-community/{name}" for name in PRESETS if name.startswith("gpt2")}


@dataclass(frozen=True)
class OpenedModel:
    """A model, how it was served where it comes from, and its tokenizer if we have it."""

    name: str
    model: GPT
    serving: ServingConfig
    tokenizer: str | None


def open_model(target: str, store: Store, *, random_weights: bool = False) -> OpenedModel:
    """The model that ``target`` names.

    Args:
        target: the first digits of a trial's id; a Hugging Face folder or repository; or a
            preset, whose published weights are then wanted.
        random_weights: a preset with freshly drawn weights instead.

    Raises:
        UsageError: it names nothing, or the trial is not trained.
        PretrainedError: a checkpoint does not fit.
    """
    if target in PRESETS:
        tokenizer = "gpt2" if PRESETS[target]["vocab_size"] == 50257 else None
        if random_weights:
            model = GPT(ModelConfig(**PRESETS[target]))
        elif target in _REPOSITORIES:
            model = GPT.from_pretrained(_REPOSITORIES[target])
        else:
            text = f"{target} has no published weights that kvlab knows of"
            raise UsageError(f"{text}; name a checkpoint folder, or use --random-weights")
        return OpenedModel(target, model, ServingConfig(), tokenizer)
    if random_weights:
        raise UsageError(f"--random-weights is for presets, and {target} is none")
    if Path(target).is_dir() or "/" in target:
        model = GPT.from_pretrained(target)
        is_gpt2 = model.config.vocab_size == 50257
        return OpenedModel(target, model, ServingConfig(), "gpt2" if is_gpt2 else None)
    if re.fullmatch(r"[0-9a-f]{1,16}", target):
        return open_trial(target, store)
    raise UsageError(f"{target} is no trial, folder or preset; presets: {', '.join(PRESETS)}")


def open_trial(prefix: str, store: Store) -> OpenedModel:
    """The model of the one trial whose id starts with ``prefix``, as it was trained.

    Raises:
        UsageError: none or several do, or it is not trained.
    """
    trial_id = store.find_trial(prefix)
    result = store.result(trial_id)
    if result is None or not store.training_done(result["training"]):
        raise UsageError(f"trial {trial_id} is not trained yet; see `kvlab status`")
    experiment = Experiment.model_validate(result["experiment"])
    model = GPT(experiment.model)
    load_weights(model, store.training_directory(result["training"]))
    return OpenedModel(trial_id, model, experiment.serving, experiment.data.tokenizer)
