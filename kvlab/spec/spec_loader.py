"""Load experiments and sweeps from files."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from kvlab.errors import Problem, SpecError
from kvlab.humanize import suggest_name
from kvlab.own_extensions import explain_missing
from kvlab.spec.experiment import Experiment, ServedModel
from kvlab.spec.extension_files import read_extension
from kvlab.spec.overrides import apply_patch, apply_scale, resolve_paths
from kvlab.spec.presets import PRESETS
from kvlab.spec.sweep import Sweep, SweepSource
from kvlab.spec.sweep_validation import find_cell_problems
from kvlab.spec.validation_errors import format_value, list_field_errors, raise_once
from kvlab.spec.yaml_reader import YamlDocument, read_yaml

SpecT = TypeVar("SpecT", bound=BaseModel)


def load_experiment(path: str | Path, overrides: Mapping[str, Any] = {}) -> Experiment:
    """Read one experiment file.

    Args:
        overrides: dotted keys to values, as in ``{"model.n_kv_head": 1}``, put over the file.
    """
    document = read_yaml(path)
    _check_kind(document, path, "experiment")
    data = _resolve_files(document, Path(path).parent)
    return validate_data(Experiment, data, document, overrides)


def load_served_model(target: str, overrides: Mapping[str, Any] = {}) -> ServedModel:
    """Return the model and serving of a preset (``gpt2``) or of an experiment file."""
    if target in PRESETS:
        data = {"name": target, "model": {"preset": target}}
        return validate_data(ServedModel, data, YamlDocument(target, data, {}, {}), overrides)
    if not target.endswith((".yaml", ".yml")):
        hint = explain_missing("preset", target)
        hint = hint or suggest_name(target, PRESETS, f"presets: {', '.join(PRESETS)}", cutoff=0.5)
        raise SpecError(f"{target}: is not a preset or a .yaml file; {hint}")
    experiment = load_experiment(target, overrides)
    return ServedModel(name=experiment.name, model=experiment.model, serving=experiment.serving)


def load_sweep(path: str | Path, scale: str = "") -> Sweep:
    """Read one sweep file and the experiment that it names.

    Every level is checked by itself and every cell as a whole, so a sweep that loads can be
    planned.

    Args:
        scale: one of the file's `scales`; empty for the file's own.

    Raises:
        SpecError: with all problems in either file, each with file, line and column.
    """
    document = read_yaml(path)
    _check_kind(document, path, "sweep")
    sweep = _validate_sweep(document, path)
    scaled = {name: apply_scale(sweep, document, name) for name in sweep.scales}
    sweeps = {name: _validate_sweep(one, path) for name, one in scaled.items()}
    if scale:
        if scale not in scaled:
            hint = f"write `scales: {{{scale}: {{experiment: ...}}}}`"
            hint = f"use {' or '.join(scaled)}" if scaled else hint
            text = f"has no scale {scale}; {hint}, or leave out --scale for the file's own"
            raise SpecError([document.problem(("scales",), text)])
        sweep, document = sweeps[scale], scaled[scale]
    sweep = _attach_source(sweep, document, path, scale)
    raise_once(find_cell_problems(sweep))
    return sweep


def _validate_sweep(document: YamlDocument, path: str | Path) -> Sweep:
    try:
        return validate_data(Sweep, {"name": Path(path).stem, **document.data}, document)
    except SpecError as error:
        raise SpecError([*error.problems, *_find_level_problems(document, path)]) from None


_OWN_KEYS = {
    "experiment": frozenset({"model", "training", "evaluation", "serving", "benchmark"}),
    "sweep": frozenset({"experiment", "question", "factors", "search"}),
}
"""Top-level keys by which a file is recognized as one kind or the other."""


def _check_kind(document: YamlDocument, path: str | Path, wanted: str) -> None:
    """Check that a sweep is not given in place of an experiment, nor the other way round."""
    other = "experiment" if wanted == "sweep" else "sweep"
    keys = document.data.keys()
    if not keys & _OWN_KEYS[other] or keys & _OWN_KEYS[wanted]:
        return
    if wanted == "sweep":
        text = "is an experiment, and a sweep belongs here; name a sweep, a file with"
        text = f"{text} `experiment: {Path(path).name}` and factors"
    else:
        text = "is a sweep, and an experiment belongs here; name the one that it reads,"
        text = f"{text} {document.data.get('experiment')}"
    key = next(key for key in keys if key in _OWN_KEYS[other])
    raise SpecError([document.problem((key,), text, at_key=True)])


def _find_level_problems(document: YamlDocument, path: str | Path) -> list[Problem]:
    """Return the problems of single levels, so that a sweep with other problems shows all."""
    factor_keys = ("experiment", "factors", "baseline", "when")
    written = {key: document.data[key] for key in factor_keys if key in document.data}
    data = {"question": "?", "design": "one_factor", **written}
    try:
        _attach_source(Sweep.model_validate(data), document, path)
    except SpecError as error:
        return error.problems
    except ValidationError:
        pass  # the factors themselves are wrong, which is among the problems already
    return []


def _attach_source(
    sweep: Sweep, document: YamlDocument, path: str | Path, scale: str = ""
) -> Sweep:
    """Return the sweep with its base experiment, after checking every cell."""
    folder = Path(path).parent
    base_path = os.path.normpath(folder / sweep.experiment)
    try:
        base_document = read_yaml(base_path)
    except SpecError as error:
        if os.path.isfile(base_path):
            raise
        reason = error.problems[0].message
        message = f"experiment = {sweep.experiment} {reason} (looked for {base_path})"
        raise SpecError([document.problem(("experiment",), message)]) from None
    base = _resolve_files(base_document, Path(base_path).parent)
    validate_data(Experiment, base, base_document)
    return sweep.with_source(SweepSource(document, base_document, base, str(folder), scale))


def _resolve_files(document: YamlDocument, folder: Path) -> dict[str, Any]:
    """Return an experiment with its paths resolved and the texts of its extensions, which run."""
    data = resolve_paths(document.data, folder)
    written = data.get("extensions", [])
    if not isinstance(written, list) or not all(isinstance(name, str) for name in written):
        text = "extensions is not a list of Python files; write [my_attention.py]"
        raise SpecError([document.problem(("extensions",), text)])
    files = dict[str, str]()
    for number, name in enumerate(written):
        path = folder / Path(name).expanduser()
        if path.name in files:
            text = f"extensions.{number} = {name} has the name of another file; rename one"
            raise SpecError([document.problem(("extensions", number), text)])
        try:
            files[path.name] = read_extension(path).text
        except OSError as error:
            text = f"cannot be read ({error.strerror}); looked for {path}"
            text = f"extensions.{number} = {name} {text}"
            raise SpecError([document.problem(("extensions", number), text)]) from None
    return data | {"extensions": files} if "extensions" in data else data


def validate_data(
    root: type[SpecT], data: Any, document: YamlDocument, overrides: Mapping[str, Any] = {}
) -> SpecT:
    """Return the data of a document as a spec."""
    data = apply_patch(data, overrides)
    try:
        return root.model_validate(data)
    except ValidationError as error:
        field_errors = list_field_errors(error, root, data)
    problems = []
    for path, message, at_key, _ in field_errors:
        dotted, problem = ".".join(map(str, path)), document.problem(path, message, at_key=at_key)
        for key, value in overrides.items():
            if f"{dotted}.".startswith(f"{key}."):
                problem = Problem(f"{key}={format_value(value)}", 0, 0, message)
        problems.append(problem)
    raise SpecError(problems)
