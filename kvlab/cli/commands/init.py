"""`kvlab init DIR`: make a folder with commented example specs and their schemas."""

import argparse
import json
from importlib.resources import files
from pathlib import Path

from kvlab.cli.shared_arguments import add_flag
from kvlab.cli.terminal import print_result
from kvlab.errors import UsageError
from kvlab.fs.atomic_files import write_atomic
from kvlab.own_extensions import find_members


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="made if it does not exist")
    add_flag(parser, "--json", "print facts as JSON")


def run(options: argparse.Namespace) -> None:
    folder = Path(options.folder)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"DIR = {folder} is a file; name a folder")
    source = Path(str(files("kvlab.cli") / "starter"))
    starter = {
        path.relative_to(source).as_posix(): path.read_text(encoding="utf-8")
        for path in source.rglob("*")
        if path.is_file()
    }
    starter[".gitignore"] = starter.pop("gitignore")  # which would act on the package itself
    for make in find_members("schemas").values():
        for kind in ("experiment", "sweep"):
            starter[f"{kind}s/{kind}.schema.json"] = json.dumps(make(kind), indent=1) + "\n"
    existing = sorted(name for name in starter if (folder / name).exists())
    if existing:
        text = f"DIR = {folder} already has {', '.join(existing)}"
        raise UsageError(f"{text}; nothing was changed: name another folder")
    for name, text in starter.items():
        write_atomic(folder / name, text)
    lines = [str(folder / name) for name in sorted(starter)]
    lines += ["", f"next: cd {folder} && kvlab plan sweeps/first.yaml"]
    print_result(options, {"folder": str(folder), "files": sorted(starter)}, "\n".join(lines))
