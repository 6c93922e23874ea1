"""Arguments that several commands share: options, types of values, sweeps."""

import argparse
import atexit
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvlab.errors import SpecError, UsageError
from kvlab.humanize import suggest_name
from kvlab.spec import Sweep, load_sweep, parse_overrides
from kvlab.store import Store
from kvlab.store.metrics import METRICS
from kvlab.store.record_archive import ARCHIVE_SUFFIX, extract_archive, is_archive

ALL_SWEEPS = "name or file; default: all"
"""What `add_record` says of a sweep that may be left out."""


def find_project_root() -> Path:
    """Return the nearest folder, from this one upwards, that holds a project; else this one.

    A project has the folders ``sweeps`` and ``experiments``, or a record in ``runs``.
    """
    here = Path.cwd()
    signs = (("sweeps", "experiments"), ("runs/sweeps", "runs/trials"))
    for folder in (here, *here.parents):
        if any(all((folder / name).is_dir() for name in names) for names in signs):
            return folder
    return here


def project_path(name: str) -> str:
    """Return a folder of the project as seen from here: ``runs``, or ``../runs`` from below."""
    return os.path.relpath(find_project_root() / name)


def default_store() -> str:
    return os.environ.get("KVLAB_STORE") or project_path("runs")


def add_flag(parser: argparse._ActionsContainer, name: str, text: str) -> None:
    """Add an option that has no value."""
    parser.add_argument(name, action="store_true", help=text)


def add_list(
    parser: argparse.ArgumentParser, name: str, metavar: str, text: str, nargs: str | None = None
) -> None:
    """Add an option that may be repeated."""
    parser.add_argument(name, action="append", default=[], nargs=nargs, metavar=metavar, help=text)


def add_scale(parser: argparse.ArgumentParser) -> None:
    text = "one of the file's scales, as sweep SWEEP-NAME (default: the file's own)"
    parser.add_argument("--scale", default="", metavar="NAME", help=text)


def add_store(parser: argparse.ArgumentParser, *, archive: bool = False) -> None:
    """Add ``--store``. With ``archive`` the command opens it by `open_store`."""
    text = f"folder of the record{f', or its {ARCHIVE_SUFFIX}' if archive else ''}"
    text += " (default: KVLAB_STORE, else runs in the project's folder)"
    parser.add_argument("--store", default=default_store(), metavar="DIR", help=text)


def add_record(parser: argparse.ArgumentParser, sweep: str = "", *, archive: bool = False) -> None:
    """Add ``--store`` and ``--json``, and before them SWEEP where ``sweep`` says what it is."""
    if sweep:
        nargs = "?" if sweep == ALL_SWEEPS else None
        parser.add_argument("sweep", metavar="SWEEP", nargs=nargs, help=sweep)
    add_store(parser, archive=archive)
    add_flag(parser, "--json", "print facts as JSON")


def open_store(place: str) -> Store:
    """Return the store in a folder, or that of an archive, unpacked until this process ends.

    Raises:
        StoreError: If the file is no archive, or is damaged.
    """
    if not (is_archive(place) and Path(place).is_file()):
        return Store(place)
    folder = tempfile.mkdtemp(prefix="kvlab-record-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return extract_archive(Path(place), Path(folder))


def add_reports(parser: argparse.ArgumentParser) -> None:
    text = "folder of reports (default: reports in the project's folder)"
    parser.add_argument("--reports", default=project_path("reports"), metavar="DIR", help=text)


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])


def add_memory(parser: argparse.ArgumentParser, use: str) -> None:
    text = f"memory of the device, such as 80GB or 24GiB: {use}"
    parser.add_argument("--memory", type=memory_size, metavar="SIZE", help=text)


def add_threads(parser: argparse.ArgumentParser) -> None:
    text = "CPU threads (default: resources.cpus of the trial or experiment, else all cores)"
    parser.add_argument("--threads", type=positive_int, metavar="N", help=text)


def set_threads(threads: int | None, cpus: float | None) -> int:
    """Set the threads of torch: as stated, else those of the trial's cores, else all cores.

    More threads than cores slow a small model down many times, as each operation waits for them.

    Args:
        threads: From ``--threads``.
        cpus: ``resources.cpus`` of a trial or an experiment.

    Returns:
        The number of threads.
    """
    import torch

    from kvlab.machine import cpu_count

    number = threads or max(1, int(cpu_count() if cpus is None else cpus))
    torch.set_num_threads(number)
    return number


def resolve_device(name: str) -> str:
    """Return the torch name of a ``--device``; ``auto`` is CUDA where there is a CUDA device.

    Raises:
        UsageError: If there is no CUDA device.
    """
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: there is no CUDA device here; use cpu")
    return name


def add_variants(parser: argparse.ArgumentParser) -> None:
    add_list(parser, "--set", "KEY=VALUE", "change a key of every target; may be repeated")
    text = "put a variant of the first target beside it; may be repeated"
    add_list(parser, "--compare", "KEY=VALUE", text, nargs="+")


class Variant(NamedTuple):
    """A target with changed keys; its name is the target and what ``--compare`` changes of it."""

    name: str
    target: str
    changes: dict[str, Any]


def list_variants(options: argparse.Namespace) -> list[Variant]:
    """Return the targets with the changes of ``--set``, then those of ``--compare``.

    Raises:
        UsageError: If a change is not KEY=VALUE.
    """
    common = parse_overrides(options.set)
    variants = [Variant(target, target, common) for target in options.target]
    first = options.target[0]
    for changes in options.compare:
        patch = {**common, **parse_overrides(changes)}
        variants.append(Variant(f"{first} {' '.join(changes)}", first, patch))
    return variants


def positive_int(text: str) -> int:
    """Parse a whole number above 0."""
    if not text.isdecimal() or not 0 < int(text) < 10**15:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def parse_number(text: str) -> float:
    """Parse a number; what is none becomes NaN, which no comparison accepts."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def positive_float(text: str) -> float:
    """Parse a finite number above 0."""
    if not 0 < parse_number(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return float(text)


def memory_size(text: str) -> int:
    """Parse a size in bytes, such as 80GB (10^9) or 24GiB (2^30)."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])(i?))?b?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is not a size; write one such as 80GB or 24GiB")
    number, prefix, binary = match.groups()
    power = " kmgt".index(prefix or " ")
    return int(float(number) * (1024 if binary else 1000) ** power)


def _is_path(text: str) -> bool:
    return text.endswith((".yaml", ".yml")) or os.sep in text


def find_sweep_file(text: str) -> str:
    """Return the file of a sweep that is given by its file or by its name.

    Raises:
        UsageError: If no file in the project's ``sweeps``, or here, has that name.
    """
    if _is_path(text):
        return text
    folders = [Path(os.path.relpath(find_project_root() / "sweeps")), Path()]
    files = [file for folder in folders for file in sorted(folder.glob("*.y*ml"))]
    named = [file for file in files if file.stem == text] or [
        file for file in files if _written_name(file) == text
    ]
    if named:
        return str(named[0])
    names = [file.stem for file in files]
    hint = suggest_name(text, names, f"there are {', '.join(names) or 'none'}")
    where = f"is neither a file nor the name of one in {folders[0]}"
    raise UsageError(f"sweep = {text} {where}; {hint}")


def _written_name(file: Path) -> str | None:
    """Return the ``name`` that a YAML file states, without reading the rest of it."""
    try:
        found = re.search(r"^name:[ \t]*([\w.-]+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return None
    return found[1] if found else None


def sweep_name(text: str) -> str:
    """Return the name of a sweep that is given by its name or its file.

    Raises:
        SpecError: If the file is not a sweep.
    """
    return load_sweep(Path(text)).name if _is_path(text) else text


def read_sweep(path: str | Path, scale: str = "") -> Sweep:
    """Read a sweep and check its names of sections and metrics, which `kvlab.spec` cannot know.

    Args:
        path: Its file, or its name; see `find_sweep_file`.
        scale: One of its `scales`; empty for the file's own.

    Raises:
        SpecError: With every problem, each with file, line and column.
    """
    sweep = load_sweep(find_sweep_file(str(path)), scale)
    if found := list(_find_unknown_names(sweep)):
        raise SpecError([sweep.source.document.problem(where, text) for where, text in found])
    return sweep


def _find_unknown_names(sweep: Sweep) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield what is wrong with sections, with the decided metric, and with a margin in its unit."""
    if sweep.report.sections:
        from kvlab.report.sections import choose_sections, explain_unknown_section  # imports scipy

        table = choose_sections(sweep.search is not None)
        for number, name in enumerate(sweep.report.sections):
            if name not in table:
                text = f"report.sections.{number} = {name} {explain_unknown_section(name, table)}"
                yield ("report", "sections", number), text
    for number, file in enumerate(sweep.base.extensions):
        for name, line in METRICS.find_taken([file.text]):
            text = f"has {file.name}:{line}: {name} is a metric of kvlab itself; rename it"
            yield ("experiment",), f"extensions.{number} {text}"
    METRICS.offer(file.text for file in sweep.base.extensions)
    metric, margin = sweep.decide.metric, sweep.decide.margin
    if metric is None:
        return
    if metric not in METRICS or METRICS[metric].better == "neither":
        usable = [name for name, one in METRICS.items() if one.better != "neither"]
        hint = suggest_name(metric, usable, f"use one of {', '.join(usable)}")
        rule = "is not measured" if metric not in METRICS else "has no better direction"
        yield ("decide", "metric"), f"decide.metric = {metric} {rule}; {hint}"
    elif metric.endswith("_served") and not any(
        cell.experiment.evaluation.served for cell in sweep.cells()
    ):
        rule = "is measured through the serving cache, and evaluation.served is false"
        yield ("decide", "metric"), f"decide.metric = {metric} {rule}; set it, or use another"
    elif margin is not None and METRICS[metric].is_share and margin >= 1:
        rule = f"is not below 1, and {metric} is a share of 1; write one such as 0.01"
        yield ("decide", "margin"), f"decide.margin = {margin:g} {rule}"
    elif margin is not None and METRICS[metric].unit == "bytes" and margin < 1:
        rule = f"is less than one byte, the unit of {metric}; give a number of bytes"
        yield ("decide", "margin"), f"decide.margin = {margin:g} {rule}"
