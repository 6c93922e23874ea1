"""Hugging Face folders to models and back. Weights come from safetensors alone, never pickle."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvlab.errors import PretrainedError
from kvlab.fs.atomic_files import write_json
from kvlab.model.hf_architectures import ARCHITECTURES, Architecture, WeightMapping
from kvlab.spec.model_config import ModelConfig

if TYPE_CHECKING:
    from kvlab.model.gpt import GPT


def read_config(folder: Path) -> tuple[Architecture, ModelConfig]:
    """The architecture and our configuration of a checkpoint folder."""
    try:
        theirs = json.loads((folder / "config.json").read_text())
        kind = theirs["model_type"]
    except FileNotFoundError:
        text = f"{folder} is no checkpoint: it has no config.json"
        raise PretrainedError(f"{text}; name a folder in Hugging Face's form") from None
    except (OSError, ValueError, KeyError) as error:
        raise PretrainedError(f"{folder}/config.json cannot be read: {error}") from None
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise PretrainedError(f"{folder}/config.json: model_type = {kind} is not one of {known}")
    architecture = ARCHITECTURES[kind]
    try:
        return architecture, ModelConfig(**architecture.read_config(theirs))
    except KeyError as error:
        raise PretrainedError(f"{folder}/config.json: {error} is missing") from None


def load_weights(model: "GPT", folder: Path, architecture: Architecture) -> None:
    """Copies a checkpoint's weights into ``model``.

    Raises:
        PretrainedError: names are missing or unknown, or shapes differ; all of them listed.
    """
    with ExitStack() as stack:
        tensors = _open_tensors(folder, stack)
        names = {_prefixed_name(name, tensors, architecture): name for name in tensors}
        problems: list[str] = []
        used: set[str] = set()
        targets = dict(model.named_parameters())
        for weight in architecture.weights(model.config):
            missing = [name for name in weight.theirs if name not in names]
            used |= set(weight.theirs)
            if missing:
                problems += [f"{name} is missing" for name in missing]
                continue
            parts = [tensors[names[n]].get_tensor(names[n]) for n in weight.theirs]
            problems += _copy_weight(targets[weight.ours], parts, weight)
        tied = {"lm_head.weight"} if model.config.tie_embeddings else set()
        unknown = [
            n for n in names if n not in used | tied and not n.endswith(architecture.ignored)
        ]
        problems += [f"{name} is not known" for name in sorted(unknown)]
    if problems:
        raise PretrainedError(f"{folder} does not fit its config.json:\n  " + "\n  ".join(problems))


def _open_tensors(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Every tensor's name and the open file that holds it."""
    tensors: dict[str, Any] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        text = "only safetensors are read, as other formats can run code"
        raise PretrainedError(f"{folder} has no *.safetensors; {text}")
    for file in files:
        try:
            handle = stack.enter_context(safe_open(file, framework="pt"))
        except Exception as error:
            raise PretrainedError(f"{file} cannot be read: {error}") from None
        tensors |= dict.fromkeys(handle.keys(), handle)
    return tensors


def _prefixed_name(name: str, tensors: Mapping[str, Any], architecture: Architecture) -> str:
    """The original GPT-2 files leave the prefix out."""
    bare = not any(other.startswith(architecture.prefix) for other in tensors)
    return architecture.prefix + name if bare and name != "lm_head.weight" else name


def _copy_weight(target: Tensor, parts: list[Tensor], weight: WeightMapping) -> Iterator[str]:
    value = torch.cat([part.T if weight.turned else part for part in parts])
    if value.shape != target.shape:
        shapes = f"{tuple(value.shape)}, not {tuple(target.shape)}"
        yield f"{' + '.join(weight.theirs)} is {shapes}"
        return
    with torch.no_grad():
        target.copy_(value)


def save_pretrained(model: "GPT", folder: str | Path) -> str:
    """Writes ``model`` as a Hugging Face folder; returns its ``model_type``.

    Raises:
        PretrainedError: no published architecture computes what this model does; says why for
            each of them.
    """
    reasons = {}
    for kind, architecture in ARCHITECTURES.items():
        reasons[kind] = architecture.misfits(model.config)
        if not reasons[kind]:
            _write_checkpoint(model, Path(folder), architecture)
            return kind
    text = "; ".join(f"not {kind}: {', '.join(why)}" for kind, why in reasons.items())
    raise PretrainedError(f"no Hugging Face architecture fits this model: {text}")


def _write_checkpoint(model: "GPT", folder: Path, architecture: Architecture) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state, tensors = dict(model.named_parameters()), {}
    for weight in architecture.weights(model.config):
        value = state[weight.ours].detach().cpu()
        parts = torch.split(value, list(weight.rows)) if weight.rows else (value,)
        for name, part in zip(weight.theirs, parts, strict=True):
            tensors[name] = (part.T if weight.turned else part).contiguous().clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", architecture.write_config(model.config))
