"""`kvlab check FILE.py`: whether an extension does what every member of its kind must."""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvlab.cli.terminal import show_status_line
from kvlab.errors import DataError, UsageError
from kvlab.spec.data_config import DataConfig
from kvlab.spec.experiment import ServedModel
from kvlab.spec.extension_files import load_extension, locate_error, read_extension
from kvlab.spec.members import Member, MemberError
from kvlab.spec.model_config import ModelConfig
from kvlab.spec.serving_config import ServingConfig
from kvlab.spec.source_options import DocumentSource
from kvlab.spec.token_metrics import TokenMetric
from kvlab.store.metrics import METRICS
from kvlab.trial.known_extensions import remember_extensions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE.py", help="a file of `extensions:`")
    parser.add_argument("--cases", type=int, default=50, help="random models; default 50")
    text = "files and folders that its sources read, in place of data.paths"
    parser.add_argument("--paths", nargs="+", default=[], metavar="PATH", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    path = Path(options.file)
    if options.cases < 1:
        raise UsageError(f"--cases {options.cases} tries nothing; use 1 or more")
    try:
        file = read_extension(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); name a Python file") from None
    extension = load_extension(file)
    remember_extensions([file.text])
    for name, line in METRICS.find_taken([file.text]):
        raise UsageError(f"{path}:{line}: {name} is a metric of kvlab itself; rename it")
    sources = [one for one in extension.members if isinstance(one, DocumentSource)]
    if options.paths and not any(one.reads_paths for one in sources):
        raise UsageError(f"no source of {path} reads data.paths; remove --paths")
    found = list[Checked]()
    with redirect_stdout(sys.stderr):  # of what the file prints
        for member in extension.members:
            if isinstance(member, TokenMetric):
                found.append(_check_metric(member, options.cases))
            elif isinstance(member, DocumentSource):
                found.append(_check_source(member, options.paths))
            else:
                found += _check_member(member, path, options.cases)
    if options.json:
        print(json.dumps([asdict(one) for one in found], indent=1))
    else:
        print("\n".join(str(one) for one in found) or f"{path} adds nothing; nothing to check")
    return int(any(one.counterexample for one in found))


@dataclass(frozen=True)
class Checked:
    """What one check of one member found.

    Attributes:
        cases: models that it was tried with.
        largest: the largest difference that it allowed.
        counterexample: the first model that fails, and how; empty if all hold.
    """

    member: str
    check: str
    cases: int
    largest: float
    counterexample: str = ""
    tried: str = "models"

    def __str__(self) -> str:
        mark = "DOES NOT HOLD" if self.counterexample else "holds"
        figure = f"{self.cases} {self.tried}"
        figure += f", within {self.largest:.1g}" if self.largest else ""
        line = f"{self.member}  {mark:<13}  {self.check} ({figure})"
        return f"{line}\n    {self.counterexample}" if self.counterexample else line


def _check_member(member: Member, path: Path, cases: int) -> Iterator[Checked]:
    """Yield what every check finds over random models, the first failure of each."""
    from kvlab.extensions.check import member_checks

    draw, drawn, refused = random.Random(0), list[tuple[ModelConfig, ServingConfig, str]](), 0
    reason = ""
    while len(drawn) < cases and refused < 20 * cases:
        try:
            model, how = member_checks.draw_case(draw, member)
            served = ServedModel.model_validate({"name": "x", "model": model, "serving": how})
        except ValidationError as error:
            refused += 1  # what the member or kvlab refuses needs no more
            reason = reason or error.errors()[0]["msg"]
            continue
        shown = json.dumps({"model": model, "serving": how}, default=_show_member)
        drawn.append((served.model, served.serving, shown))
    if not drawn:
        text = f"{path}: {member.name} goes with none of {refused} random models"
        raise UsageError(f"{text}; it says of the first: {reason}")
    for name, check in member_checks.list_checks(member).items():
        few = drawn[: max(1, cases // 10)] if name.startswith("a training") else drawn
        tries = ((shown, partial(check, config, serving)) for config, serving, shown in few)
        yield (found := _try(member, name, "models", tries))
        if found.counterexample and check in member_checks.FIRST_CHECKS:
            return  # the others would fail for the same reason


def _show_member(member: Member) -> Any:
    return {member.name: member.options.model_dump()} if member.options else member.name


def _try(
    member: Member, check: str, tried: str, cases: Iterable[tuple[str, Callable[[], float | None]]]
) -> Checked:
    """Run a check over cases, up to the first that fails."""
    largest, number = 0.0, 0
    for number, (shown, run_case) in enumerate(cases, 1):
        if sys.stderr.isatty():
            show_status_line(f"{member}: {check} {number}")
        try:
            largest = max(largest, run_case() or 0.0)
        except Exception as error:
            failure = _describe(error, member) + (f"\n    with {shown}" if shown else "")
            return Checked(member.name, check, number, largest, failure, tried)
    return Checked(member.name, check, number, largest, "", tried)


def _check_metric(metric: TokenMetric, cases: int) -> Checked:
    """Try a metric with random logits."""
    from kvlab.extensions.check.member_checks import check_metric

    name = "a finite number for each token, whatever is beside it"
    tries = (("", partial(check_metric, metric, seed)) for seed in range(1, cases + 1))
    return _try(metric, name, "cases", tries)


def _check_source(source: DocumentSource, paths: list[str]) -> Checked:
    """Read a source twice, with the defaults of its options."""
    from kvlab.extensions.check.source_checks import check_source

    if source.reads_paths and not paths:
        raise UsageError(f"{source} reads data.paths; name a file or a folder with --paths")
    symbols = getattr(source.options and source.options(), "symbols", None)
    tokenizer = f"symbols:{symbols}" if symbols else "bytes"
    settings = {"source": source, "paths": paths if source.reads_paths else []}
    data = DataConfig.model_validate({**settings, "tokenizer": tokenizer})
    name, failure = "documents of text, the same in another process", ""
    count, tried = 0, "documents"
    try:
        count, tried = check_source(source, data)
    except Exception as error:
        failure = _describe(error, source)
    return Checked(source.name, name, count, 0.0, failure, tried)


def _describe(error: Exception, member: Member) -> str:
    """Return what failed, with the line of the file where it did, or else of the member's class."""
    if isinstance(error, DataError):  # has a place
        return str(error)
    is_plain = isinstance(error, AssertionError | MemberError)
    name = "" if is_plain else f"{type(error).__name__}: "
    return f"{locate_error(error) or locate_error(MemberError(member, ''))}: {name}{error}"
