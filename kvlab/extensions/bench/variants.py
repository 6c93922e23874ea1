"""The models that `kvlab bench` measures side by side, and what is said where they do not fit."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil
import torch

from kvlab.benchmark.session import Session, Variant
from kvlab.errors import ResourceError
from kvlab.model import GPT
from kvlab.oom import classify_oom
from kvlab.spec import load_experiment, load_served_model
from kvlab.spec.dtypes import MODEL_DTYPE
from kvlab.spec.experiment import Experiment, ServedModel
from kvlab.spec.presets import PRESETS
from kvlab.store import Store
from kvlab.trial.model_targets import OpenedModel, guess_tokenizer, open_model, override_serving


class VariantFactory:
    """Open targets as variants of a benchmark; equal random models share their weights.

    Args:
        store: where trials are looked up.
        device: torch name of the models' device.

    Attributes:
        cpus: the cores that each trial or experiment file asks for, by its target.
    """

    def __init__(self, store: Store, device: str):
        self._store, self._device = store, device
        self.cpus: dict[str, float] = {}
        self._random_models: dict[str, GPT] = {}

    def make_variant(
        self, target: str, changes: Mapping[str, Any], name: str, dtype: str | None = None
    ) -> Variant:
        """Return the variant that ``target`` names.

        A preset or a spec file gets random weights: speed and memory do not depend on them.

        Args:
            target: a preset, a spec file, or what `open_model` takes.
            changes: values by dotted key, which override a preset or spec file.
            dtype: of the weights. None: the one in which trials are measured on this device
                (`Experiment.weight_dtype`) if there is an experiment, else float32.

        Raises:
            UsageError: ``target`` names nothing, or ``changes`` do not fit its weights.
            SpecError: the preset with its changes, or the spec file, is wrong.
            PretrainedError: a checkpoint does not fit.
        """
        opened: OpenedModel | None = None
        experiment: Experiment | None = None
        if target in PRESETS:
            spec: ServedModel | Experiment = load_served_model(target, changes)
        elif target.endswith((".yaml", ".yml")):
            spec = experiment = load_experiment(target, changes)
        else:
            opened = open_model(target, self._store)
            experiment = opened.experiment
        if experiment is not None:
            self.cpus[target] = experiment.resources.cpus
            dtype = dtype or experiment.weight_dtype(torch.device(self._device).type)
        dtype = dtype or MODEL_DTYPE
        if opened is not None:
            serving = override_serving(opened, changes)
            model = opened.model.to(self._device, getattr(torch, dtype)).eval()
            return Variant(name, model, serving, opened.tokenizer)
        key = f"{dtype} {spec.model.model_dump_json()}"
        if key not in self._random_models:
            model = GPT(spec.model, device=self._device, dtype=getattr(torch, dtype))
            self._random_models[key] = model.eval()
        tokenizer = experiment.data.tokenizer if experiment else guess_tokenizer(spec.model)
        return Variant(name, self._random_models[key], spec.serving, tokenizer)


@contextmanager
def explain_out_of_memory(session: Session) -> Iterator[None]:
    """Turn any out-of-memory error into one that names what was being measured.

    Raises:
        ResourceError: memory ran out.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not classify_oom(error):
            raise
        raise _does_not_fit_error(session, session.activity) from None


def check_caches_fit(session: Session) -> None:
    """Refuse batch sizes whose caches exceed the free memory.

    Systems that overcommit memory would end the process instead of raising an error.

    Raises:
        ResourceError: the caches of a batch alone need more than the device has free.
    """
    if session.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(session.device)
    else:
        free = psutil.virtual_memory().available + psutil.swap_memory().free
    settings = session.settings
    length = settings.prompt_tokens + settings.new_tokens
    for batch in settings.batches:
        # the variants run in turns, so all of their caches exist at once
        needed = sum(v.layout.stored_bytes(batch, length, v.dtype) for v in session.variants)
        if needed > free:
            reason = f": its caches take {needed:,} bytes where {free:,} are free"
            raise _does_not_fit_error(session, f"batch {batch}", reason)


def _does_not_fit_error(session: Session, activity: str, reason: str = "") -> ResourceError:
    return ResourceError(
        f"{activity} does not fit on this {session.device.type}{reason}; use smaller --batches"
        " (--only limit finds the largest), shorter --contexts, or fewer variants at once"
    )
