"""`kvlab init DIR`: a folder to start from, with commented example specs and their schemas."""

import argparse
import json
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from kvlab.cli.shared_arguments import add_json
from kvlab.errors import UsageError
from kvlab.fs.atomic_files import write_atomic
from kvlab.spec.json_schema import json_schema

_INSTALLED_NAMES = {"gitignore": ".gitignore"}
"""Names that a package should not carry itself."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="made if it does not exist")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    folder = Path(options.folder)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"DIR = {folder} is a file; name a folder")
    wanted = _read_starter(files("kvlab.cli") / "starter", "")
    for kind in ("experiment", "sweep"):
        wanted[f"{kind}s/{kind}.schema.json"] = json.dumps(json_schema(kind), indent=1) + "\n"
    there = [name for name in wanted if (folder / name).exists()]
    if there:
        text = f"DIR = {folder} already has {', '.join(sorted(there))}"
        raise UsageError(f"{text}; nothing was changed: name another folder")
    for name, text in wanted.items():
        write_atomic(folder / name, text)
    if options.json:
        print(json.dumps({"folder": str(folder), "files": sorted(wanted)}))
    else:
        print("\n".join(str(folder / name) for name in sorted(wanted)))
        print(f"\nnext: cd {folder} && kvlab plan sweeps/first.yaml")
    return 0


def _read_starter(place: Traversable, prefix: str) -> dict[str, str]:
    """Relative path -> text of every file of the starter folder."""
    found: dict[str, str] = {}
    for entry in place.iterdir():
        if entry.is_dir():
            found |= _read_starter(entry, f"{prefix}{entry.name}/")
        else:
            found[prefix + _INSTALLED_NAMES.get(entry.name, entry.name)] = entry.read_text(
                encoding="utf-8"
            )
    return found
