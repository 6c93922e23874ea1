"""A model to use, by what a person calls it: a trial's id, a checkpoint folder, or a preset."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvlab.benchmark.session import Variant
from kvlab.errors import UsageError
from kvlab.model import GPT
from kvlab.spec import Experiment, ModelConfig, ServingConfig, load_experiment, load_served_model
from kvlab.spec.presets import PRESETS
from kvlab.store import Store
from kvlab.train import load_final_weights

_PRESET_REPOSITORIES = {
    name: f"openai-community/{name}" for name in PRESETS if name.startswith("gpt2")
}


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
        elif target in _PRESET_REPOSITORIES:
            model = GPT.from_pretrained(_PRESET_REPOSITORIES[target])
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
    if result is None or not store.is_trained(result["training"]):
        raise UsageError(f"trial {trial_id} is not trained yet; see `kvlab status`")
    experiment = Experiment.model_validate(result["experiment"])
    model = GPT(experiment.model)
    load_final_weights(model, store.training_directory(result["training"]))
    return OpenedModel(trial_id, model, experiment.serving, experiment.data.tokenizer)


# What `kvlab bench` measures, by what a person calls it: preset, spec file, trial, checkpoint.


GPT2_VOCABULARY = 50257


class VariantFactory:
    """Opens targets as variants; equal random models are made once and shared.

    Args:
        store: where trials are looked up.
        device: where the models go.
    """

    def __init__(self, store: Store, device: str):
        self._store, self._device = store, device
        self._random: dict[str, GPT] = {}

    def variant(self, target: str, changes: Mapping[str, Any], name: str, dtype: str) -> Variant:
        """A preset or a spec file gets random weights: speed and memory do not depend on them.

        Args:
            changes: dotted keys to values, put over a preset or spec file.
            dtype: of the weights.

        Raises:
            UsageError: the target names nothing, or its weights fix what ``changes`` would change.
            SpecError: the preset with its changes, or the spec file, is wrong.
            PretrainedError: a checkpoint does not fit.
        """
        if target in PRESETS or target.endswith((".yaml", ".yml")):
            return self._from_spec(target, changes, name, dtype)
        if changes:
            wrong = next((key for key in changes if not key.startswith("serving.")), None)
            if wrong:
                text = f"{wrong} changes a model whose weights are given ({target})"
                raise UsageError(f"{text}; change serving.* only, or name a preset or spec file")
        opened = open_model(target, self._store)
        serving = opened.serving
        if changes:
            kept = {key.removeprefix("serving."): value for key, value in changes.items()}
            serving = _parse_serving(serving.model_dump() | kept)
        model = opened.model.to(self._device, getattr(torch, dtype)).eval()
        return Variant(name, model, serving, opened.tokenizer)

    def _from_spec(self, target: str, changes: Mapping[str, Any], name: str, dtype: str) -> Variant:
        shape = load_served_model(target, dict(changes))
        key = f"{dtype} {shape.model.model_dump_json()}"
        if key not in self._random:
            model = GPT(shape.model, device=self._device, dtype=getattr(torch, dtype))
            self._random[key] = model.eval()
        tokenizer = None
        if target not in PRESETS:
            tokenizer = load_experiment(target, dict(changes)).data.tokenizer
        elif shape.model.vocab_size == GPT2_VOCABULARY:
            tokenizer = "gpt2"
        return Variant(name, self._random[key], shape.serving, tokenizer)


def _parse_serving(fields: dict[str, Any]) -> Any:
    from pydantic import ValidationError

    from kvlab.spec import ServingConfig

    try:
        return ServingConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(f"serving.{place} = {first['input']}: {first['msg']}") from None
