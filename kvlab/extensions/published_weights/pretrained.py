"""Load models from Hugging Face folders and write them there.

Weights are read from safetensors alone, never from pickles, which can run code.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvlab.errors import PretrainedError, StoreError
from kvlab.extensions.published_weights import files as checkpoint_files
from kvlab.extensions.published_weights.architectures import (
    GPT2,
    Gemma3,
    Llama,
    Mistral,
    Qwen3,
    SmolLM3,
)
from kvlab.extensions.published_weights.conversion import Architecture
from kvlab.extensions.published_weights.deepseek import DeepSeekV2
from kvlab.fs.atomic_files import explain_write_errors, open_regular, write_json
from kvlab.humanize import summarize_error
from kvlab.spec.flops import parameter_count
from kvlab.spec.model_config import ModelConfig

if TYPE_CHECKING:
    from kvlab.model.gpt import GPT

_MEMBERS = (GPT2(), Llama(), Mistral(), SmolLM3(), Qwen3(), Gemma3(), DeepSeekV2())
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

ARCHITECTURES: dict[str, Architecture] = {one.model_type: one for one in _MEMBERS}
"""``model_type`` of a checkpoint -> how it is read and written."""


def load_pretrained(
    model_class: "type[GPT]", path_or_repo: str | Path, **model_changes: Any
) -> "GPT":
    """Return a checkpoint's model; see `kvlab.model.GPT.from_pretrained`."""
    folder = checkpoint_files.resolve_checkpoint_folder(path_or_repo)
    architecture, config = read_config(folder)
    check_sizes(folder, config)
    if model_changes:
        config = ModelConfig(**{**config.model_dump(), **model_changes})
    model = model_class(config, device="meta").to_empty(device="cpu")
    if config.tie_embeddings:
        model.lm_head.weight = model.token_embedding.weight
    load_weights(model, folder, architecture)
    return model


def read_config(folder: Path) -> tuple[Architecture, ModelConfig]:
    """Return the architecture and the model configuration of a checkpoint folder.

    Raises:
        PretrainedError: ``config.json`` is missing or unreadable, or describes a model that `GPT`
            cannot compute.
    """
    hf_config = checkpoint_files.read_checkpoint_config(folder)
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        text = f"{folder}/config.json: model_type = {model_type} is not one of {supported}"
        raise PretrainedError(text)
    architecture = ARCHITECTURES[model_type]
    return architecture, _read_model(architecture, hf_config, f"{folder}/config.json: ")


def read_shape(path_or_repo: str) -> dict[str, Any]:
    """Return the keys of `model` of a checkpoint, by its ``config.json`` alone.

    Raises:
        PretrainedError: as `read_config`.
    """
    _, config = read_config(checkpoint_files.resolve_checkpoint_folder(path_or_repo))
    return config.model_dump(exclude_defaults=True)


def _read_model(architecture: Architecture, hf_config: dict[str, Any], place: str) -> ModelConfig:
    """Return the model of a configuration; errors begin with ``place``."""
    try:
        return ModelConfig(**architecture.read_config(hf_config))
    except PretrainedError:
        raise
    except KeyError as error:
        raise PretrainedError(f"{place}{error} is missing") from None
    except ValidationError as error:
        first = error.errors()[0]
        value = f"{'.'.join(map(str, first['loc']))} = {str(first['input'])[:80]}"
        raise PretrainedError(f"{place}{value}: {first['msg']}") from None
    except (TypeError, AttributeError, ValueError, ArithmeticError) as error:
        text = f"{place}a setting has a value of another kind ({error})"
        raise PretrainedError(text) from None


def list_losses(architecture: Architecture, config: ModelConfig) -> list[str]:
    """Return what of a model would not be read again from its configuration; empty if all would."""
    try:
        read = _read_model(architecture, architecture.write_config(config), "").computation()
    except PretrainedError as error:
        return [str(error)]
    own = config.computation()
    keys = [key for key in own | read if own.get(key) != read.get(key)]
    return [
        f"the model has its own {key}" if read.get(key) is None else f"{key} is not {read[key]}"
        for key in keys
    ]


@contextmanager
def _open_tensors(path: Path) -> Iterator[Any]:
    """Yield a safetensors file, whose header the library compares with the file.

    Raises:
        PretrainedError: it is no such file.
    """
    try:
        open_regular(path).close()  # a pipe might never answer
        file = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise PretrainedError(f"{path} cannot be read: {summarize_error(error)}") from None
    with file:
        yield file


def check_sizes(folder: Path, config: ModelConfig) -> None:
    """Check that a checkpoint's files hold the model that its ``config.json`` describes.

    No memory is taken before: a few bytes of JSON can describe a model of any size.

    Raises:
        PretrainedError: The files have less than half of the model, or memory is too small.
    """
    held = 0
    for path in checkpoint_files.list_checkpoint_files(folder)[1:]:
        with _open_tensors(path) as file:
            held += sum(math.prod(one.get_shape()) for one in map(file.get_slice, file.keys()))
    parameters = parameter_count(config)
    needed = 4 * parameters
    size = f"a model of {parameters:,} parameters, {needed:,} bytes in float32"
    if 2 * held < parameters:  # where less is missing, `load_weights` names it
        text = f"{folder}/config.json describes {size}, and the files hold {held:,} numbers"
        raise PretrainedError(f"{text}; get the whole checkpoint, or repair config.json")
    free = psutil.virtual_memory().available
    if needed > free:
        text = f"{folder} is {size}, and {free:,} bytes of memory are free"
        raise PretrainedError(f"{text}; use a larger machine, or a smaller model")


@torch.no_grad()
def load_weights(model: "GPT", folder: Path, architecture: Architecture) -> None:
    """Copy a checkpoint's weights into ``model``.

    Raises:
        PretrainedError: names are missing or unknown, or shapes differ; all of them are listed.
    """
    with ExitStack() as stack:
        files: dict[str, Any] = {}  # of each tensor
        for path in checkpoint_files.list_checkpoint_files(folder)[1:]:
            file = stack.enter_context(_open_tensors(path))
            files |= dict.fromkeys(file.keys(), file)
        # GPT-2's original files omit the prefix of a language model's checkpoint
        prefix = architecture.prefix
        prefix = "" if any(name.startswith(prefix) for name in files) else prefix
        names = {name if name == "lm_head.weight" else prefix + name: name for name in files}
        problems: list[str] = []
        used: set[str] = set()
        parameters = dict(model.named_parameters())
        for mapping in architecture.iter_weights(model.config):
            missing = [name for name in mapping.hf_names if name not in names]
            used |= set(mapping.hf_names)
            if missing:
                problems += [f"{name} is missing" for name in missing]
                continue
            tensors = [files[names[n]].get_tensor(names[n]) for n in mapping.hf_names]
            parameter, source = parameters[mapping.name], " + ".join(mapping.hf_names)
            codes = sorted(str(one.dtype) for one in tensors if one.dtype not in _DTYPES)
            value = None
            with suppress(RuntimeError):  # of shapes that do not go together
                value = mapping.read(tensors)
            if codes:  # their scales would be ignored
                problems.append(f"{source} is {codes[0]}, and only float16 and wider is read")
            elif value is None or value.shape != parameter.shape:
                shapes = " + ".join(str(tuple(one.shape)) for one in tensors)
                problems.append(f"{source} is {shapes}, not {tuple(parameter.shape)}")
            elif not torch.isfinite(value).all():
                problems.append(f"{source} has numbers that are not finite")
            else:
                parameter.copy_(value)
        if model.config.tie_embeddings:
            used.add("lm_head.weight")
        unknown = [name for name in names if name not in used]
        problems += [
            f"{name} is not known"
            for name in sorted(unknown)
            if not name.endswith(architecture.ignored_suffixes)
        ]
    if problems:
        text = "\n  ".join(problems)  # a sweep shows the first line
        raise PretrainedError(f"{folder} does not fit its config.json: {text}")


def save_pretrained(model: "GPT", folder: str | Path, *, end_of_text: int | None = None) -> str:
    """Write ``model`` as a Hugging Face folder; return its ``model_type``.

    Args:
        end_of_text: the token id between documents, written as the id of their beginning and of
            their end. None: unknown, and written as such, since the defaults of Hugging Face are
            those of other tokenizers.

    Raises:
        PretrainedError: no published architecture computes what this model does; the message
            says why for each of them.
        StoreError: the folder cannot be written.
    """
    reasons = []
    for model_type, architecture in ARCHITECTURES.items():
        losses = list_losses(architecture, model.config)
        if not losses:
            hf_config = architecture.write_config(model.config)
            hf_config |= {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
            parameters = dict(model.named_parameters())
            tensors: dict[str, Tensor] = {}
            for mapping in architecture.iter_weights(model.config):
                tensors |= mapping.write(parameters[mapping.name].detach().cpu())
            folder = Path(folder)
            with explain_write_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
            try:
                save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            except SafetensorError as error:
                raise StoreError(f"{folder} cannot be written: {error}; use another") from None
            write_json(folder / "config.json", hf_config)
            return model_type
        reasons.append(f"not {model_type}: {', '.join(losses)}")
    raise PretrainedError(f"no Hugging Face architecture fits this model: {'; '.join(reasons)}")
