"""`kvlab data`: get evaluation sets, prepare text, list and verify datasets."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvlab.cli.shared_arguments import add_flag, add_list, positive_int
from kvlab.cli.terminal import format_table, print_result
from kvlab.data import hellaswag_dataset
from kvlab.data.data_dir import get_data_dir
from kvlab.data.dataset_preparation import list_prepared_datasets, prepare_dataset
from kvlab.data.shards import read_dataset_facts, read_manifest, verify_dataset
from kvlab.errors import DataError, DatasetDamaged, Problem, SpecError, UsageError
from kvlab.humanize import format_bytes, format_number, suggest_name
from kvlab.spec import DataConfig, load_experiment, parse_overrides
from kvlab.spec.data_config import SOURCES
from kvlab.spec.evaluation_config import HELLASWAG_ITEMS
from kvlab.spec.overrides import apply_patch, resolve_path_value
from kvlab.spec.validation_errors import list_field_errors
from kvlab.spec.yaml_reader import read_yaml

EPILOG = """\
examples:
  kvlab data get hellaswag
  kvlab data prepare experiments/quickstart.yaml
  kvlab data prepare fineweb-edu-10b --set data.max_tokens=2e9
  kvlab data prepare files --set 'data.paths=[books/]' --set data.tokenizer=gpt2:4096
  kvlab data list
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    get = _add_action(actions, "get", "get an evaluation set and check it", _run_get)
    get.add_argument("name", choices=["hellaswag"])

    prepare = _add_action(actions, "prepare", "turn text into tokens, once", _run_prepare)
    prepare.add_argument("target", help=f"an experiment file, or a source: {', '.join(SOURCES)}")
    add_list(prepare, "--set", "KEY=VALUE", "change a key of data; may be repeated")
    prepare.add_argument("--workers", type=positive_int, help="processes (default: one per core)")

    _add_action(actions, "list", "list evaluation sets and prepared text", _run_list)
    _add_action(actions, "verify", "read all data again and compare checksums", _run_verify)


def run(options: argparse.Namespace) -> int | None:
    code: int | None = options.action(options)
    return code


def _add_action(
    actions: Any, name: str, line: str, function: Callable[[argparse.Namespace], int | None]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=line, description=line)
    add_flag(parser, "--json", "print facts as JSON")
    parser.set_defaults(action=function)
    return parser


def _run_get(options: argparse.Namespace) -> None:
    path = hellaswag_dataset.get_hellaswag_file(_print_progress)
    items, licence = HELLASWAG_ITEMS, hellaswag_dataset.HELLASWAG_LICENCE
    facts = {"name": "hellaswag", "path": str(path), "items": items, "licence": licence}
    facts["sha256"] = hellaswag_dataset.HELLASWAG_SHA256
    text = f"HellaSwag validation, {items:,} items, {licence}: {path}"
    print_result(options, facts, text)


def _run_prepare(options: argparse.Namespace) -> None:
    data = _read_data_config(options.target, parse_overrides(options.set))
    try:
        dataset = prepare_dataset(data, _print_progress, workers=options.workers)
    except DataError as error:
        if error.field is None:
            raise
        raise SpecError([_locate(error.field, str(error), options)]) from None
    for line in read_dataset_facts(dataset.folder).warnings:
        _print_progress(f"warning: {line}")
    manifest = {**read_manifest(dataset.folder), "licence": dataset.licence}
    train, held_out = manifest["splits"]["train"], manifest["splits"]["validation"]
    lines = [
        f"{dataset.folder}",
        f"train      {train['tokens']:,} tokens, {train['documents']:,} documents",
        f"held out   {held_out['tokens']:,} tokens, {held_out['documents']:,} documents,"
        f" {held_out['text_bytes'] / held_out['tokens']:.3f} bytes a token",
        f"left out   {manifest['repeated_documents']:,} copies and near-duplicates,"
        f" {manifest['shared_documents']:,} held-out documents with passages of the training text",
        "overlap    of the held-out tokens "
        + ", ".join(f"{share:.2%} are in {n}-grams" for n, share in dataset.overlap.items())
        + " of the training text",
        f"tokenizer  {dataset.tokenizer}",
        f"licence    {dataset.licence}",
        f"digest     {dataset.digest}",
    ]
    print_result(options, {"folder": str(dataset.folder), **manifest}, "\n".join(lines))


def _locate(key: str, message: str, options: argparse.Namespace) -> Problem:
    """Return where a key of `data` was written: in the experiment's file, or as an option."""
    target: str = options.target
    if any(key.startswith(text.partition("=")[0]) for text in options.set):
        return Problem("--set", 0, 0, message)
    if not target.endswith((".yaml", ".yml")):
        return Problem(target, 0, 0, message)
    path = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
    return read_yaml(target).problem(path, message)


def _run_list(options: argparse.Namespace) -> None:
    datasets: list[dict[str, Any]] = []
    damaged = []
    for path in list_prepared_datasets():
        try:
            datasets.append({"folder": str(path), **read_manifest(path)})
        except DatasetDamaged as error:
            damaged.append(str(error))
    folder, hellaswag = str(get_data_dir()), hellaswag_dataset.find_hellaswag_file()
    facts: dict[str, Any] = {"folder": folder, "hellaswag": hellaswag and str(hellaswag)}
    facts |= {"datasets": datasets, "damaged": damaged}
    lines = [f"data folder: {folder}", f"HellaSwag: {hellaswag or 'not here'}"]
    if datasets:
        titles = "train, held out, overlap, documents, on disk, tokenizer, identity, source"
        rows = [titles.split(", ")]
        for one in datasets:
            train, validation = one["splits"]["train"], one["splits"]["validation"]
            tokens, overlap = train["tokens"] + validation["tokens"], one.get("overlap")
            rows.append([
                format_number(train["tokens"]),
                format_number(validation["tokens"]),
                f"{overlap[max(overlap, key=int)]:.2%}" if overlap else "not measured",
                f"{train['documents'] + validation['documents']:,}",
                format_bytes(tokens * int(one["dtype"][-1])),
                one["tokenizer"],
                one["identity"][:16],
                one["source"],
            ])  # fmt: skip
        lines.append(format_table(rows, "rrrrr"))
    print_result(options, facts, "\n".join([*lines, *damaged]))


def _run_verify(options: argparse.Namespace) -> int:
    problems: list[str] = []
    folders = list_prepared_datasets()
    for folder in folders:
        _print_progress(f"reading {folder}")
        problems += verify_dataset(folder)
    has_hellaswag = hellaswag_dataset.find_hellaswag_file() is not None
    try:
        if has_hellaswag:
            hellaswag_dataset.get_hellaswag_file()
    except DataError as error:
        problems.append(str(error))
    checked = len(folders) + has_hellaswag
    summary = f"{checked} checked, {len(problems)} problems"
    facts = {"checked": checked, "problems": problems}
    print_result(options, facts, "\n".join([*problems, summary]))
    return int(bool(problems))


def _read_data_config(target: str, changes: dict[str, Any]) -> DataConfig:
    """Return `data` of an experiment's file, or of a source alone, with changed keys."""
    if other := [key for key in changes if not key.startswith("data.")]:
        raise UsageError(f"--set {other[0]} changes no key of data; write data.KEY=VALUE")
    changes = {key: resolve_path_value(key, value, Path.cwd()) for key, value in changes.items()}
    if target.endswith((".yaml", ".yml")):
        return load_experiment(target, changes).data
    if target not in SOURCES:
        hint = suggest_name(target, SOURCES, f"sources: {', '.join(SOURCES)}")
        raise UsageError(f"{target}: is not a text source or a .yaml file; {hint}")
    values = apply_patch({"data": {"source": target}}, changes)["data"]
    try:
        return DataConfig.model_validate(values)
    except ValidationError as error:
        problems = list_field_errors(error, DataConfig, values)
    raise UsageError("\n".join(one.message for one in problems))


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
