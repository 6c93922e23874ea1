"""What `kvlab bench` measures, by what a person calls it: preset, spec file, trial, checkpoint."""

from collections.abc import Mapping
from typing import Any

import torch

from kvlab.benchmark.session import Variant
from kvlab.errors import UsageError
from kvlab.model import GPT
from kvlab.spec import load_experiment, load_shape
from kvlab.spec.presets import PRESETS
from kvlab.trial.models import open_model
from kvlab.trial.record import Store

GPT2_VOCABULARY = 50257


class Targets:
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
            serving = _serving(serving.model_dump() | kept)
        model = opened.model.to(self._device, getattr(torch, dtype)).eval()
        return Variant(name, model, serving, opened.tokenizer)

    def _from_spec(self, target: str, changes: Mapping[str, Any], name: str, dtype: str) -> Variant:
        shape = load_shape(target, dict(changes))
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


def _serving(fields: dict[str, Any]) -> Any:
    from pydantic import ValidationError

    from kvlab.spec import ServingConfig

    try:
        return ServingConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(f"serving.{place} = {first['input']}: {first['msg']}") from None
