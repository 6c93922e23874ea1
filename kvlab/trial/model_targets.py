"""Open models by what a person names: a trial's id, a checkpoint, a preset, or a spec file."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvlab.benchmark.session import Variant
from kvlab.errors import UsageError
from kvlab.model import GPT
from kvlab.spec import Experiment, ModelConfig, ServingConfig
from kvlab.spec.checkpoint_tools import find_checkpoint_tool
from kvlab.spec.experiment import ServedModel
from kvlab.spec.extension_files import offer_extensions
from kvlab.spec.overrides import apply_patch
from kvlab.spec.presets import PRESETS
from kvlab.spec.validation_errors import list_field_errors
from kvlab.store import Store
from kvlab.store.record_forms import refuse_malformed
from kvlab.train.tensor_files import load_final_weights
from kvlab.trial.known_extensions import trust_known

GPT2_VOCABULARY = 50257


@dataclass(frozen=True)
class OpenedModel(Variant):
    """A model with its origin's serving configuration.

    Attributes:
        experiment: that of its trial; None for a model of no trial.
    """

    experiment: Experiment | None = None


def open_model(target: str, store: Store, *, random_weights: bool = False) -> OpenedModel:
    """Open the model that ``target`` names.

    Args:
        target: the first digits of a trial's id; a Hugging Face folder or repository; or a
            preset, of which the published weights are loaded.
        store: where trials are looked up.
        random_weights: draw the weights of a preset instead.

    Raises:
        UsageError: ``target`` names nothing, or the trial is not trained.
        PretrainedError: a checkpoint does not fit.
    """
    if random_weights and target not in PRESETS:
        raise UsageError(f"--random-weights is for presets, and {target} is none")
    if random_weights:
        model = GPT(ModelConfig(**PRESETS[target]))
    elif target in PRESETS and target.startswith("gpt2"):
        model = GPT.from_pretrained(f"openai-community/{target}")
    elif target in PRESETS:
        text = f"{target} has no published weights that kvlab knows of"
        raise UsageError(f"{text}; name a checkpoint folder, or use --random-weights")
    elif Path(target).is_dir() or "/" in target:
        model = GPT.from_pretrained(target)
    elif re.fullmatch(r"[0-9a-f]{1,16}", target):
        return open_trial(target, store)
    else:
        raise UsageError(f"{target} is no trial, folder or preset; presets: {', '.join(PRESETS)}")
    tokenizer = guess_tokenizer(model.config)
    if tokenizer is None and not random_weights:
        name = str(Path(target).resolve()) if Path(target).is_dir() else target
        tokenizer = name if find_checkpoint_tool("has_tokenizer")(name) else None
    return OpenedModel(target, model, ServingConfig(), tokenizer)


def open_trial(prefix: str, store: Store) -> OpenedModel:
    """Open the trained model of the one trial whose id starts with ``prefix``.

    Raises:
        UsageError: none or several do, or it is not trained.
    """
    trial_id = store.find_trial(prefix)
    result = store.result(trial_id)
    if result is None:
        raise UsageError(f"trial {trial_id} has no result yet; see `kvlab status`")
    if not store.is_trained(result["training"]):
        text = f"the weights of trial {trial_id} are not in {store.path}, though its result is"
        hint = "copy them with `kvlab copy --weights`, or use the store that trained it"
        raise UsageError(f"{text}; {hint}")
    if unknown := trust_known(result["experiment"]):
        path = store.trial_directory(trial_id) / "trial.json"
        text = f"trial {trial_id} runs {unknown[0]}, code of its record that was never run on this"
        hint = f"read it in {path}, save it as a file, and run `kvlab check` on the file"
        raise UsageError(f"{text} machine; {hint}")
    with refuse_malformed(trial_id):
        # a record may have settings of an earlier version, at what was their default
        experiment = Experiment.model_validate(result["experiment"], extra="ignore")
    model = GPT(experiment.model)
    model.trained_kv = experiment.training.kv
    load_final_weights(model, store.training_directory(result["training"]))
    tokenizer = experiment.data.tokenizer
    return OpenedModel(trial_id, model, experiment.serving, tokenizer, experiment)


def guess_tokenizer(config: ModelConfig) -> str | None:
    """Return the tokenizer that a vocabulary of this size has; None if no name tells it."""
    return "gpt2" if config.vocab_size == GPT2_VOCABULARY else None


def override_serving(opened: OpenedModel, changes: Mapping[str, Any]) -> ServingConfig:
    """Return how a model is served, with ``changes`` by dotted key, such as ``serving.tie``.

    Raises:
        UsageError: A change is not of ``serving``, or does not suit the model's layers.
    """
    if not changes:
        return opened.serving
    other = next((key for key in changes if not key.startswith("serving.")), None)
    if other:
        text = f"{other} changes a model whose weights are given ({opened.name})"
        raise UsageError(f"{text}; change serving.* only, or name a preset or spec file")
    serving = opened.serving.model_dump()
    data = {"name": opened.name, "model": opened.model.config, "serving": serving}
    data = apply_patch(data, changes)
    files = opened.experiment.extensions if opened.experiment else ()
    try:
        with offer_extensions({"extensions": files}):
            return ServedModel.model_validate(data).serving
    except ValidationError as error:
        raise UsageError(list_field_errors(error, ServedModel, data)[0].message) from None
