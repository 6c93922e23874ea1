"""The source `docstrings`: English documentation of installed packages. Nothing is downloaded."""

import ast
import hashlib
import re
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, final

from kvlab.data.data_dir import ProgressCallback
from kvlab.data.sources import TextSource, TextUnit
from kvlab.errors import DataError
from kvlab.fs.atomic_files import file_sha256
from kvlab.spec import DataConfig

# All are dependencies of kvlab, so equal versions of them are an equal text.
PACKAGES = ("matplotlib", "mlflow", "networkx", "numpy", "optuna", "pandas", "ray",
            "scikit-learn", "scipy", "sqlalchemy", "sympy", "torch")  # fmt: skip
MIN_CHARACTERS = 200
MIN_PROSE = 0.7  # share of letters and spaces; tables, formulas and code have less
_UNIT_FILES = 32
_EXCLUDED_PATHS = re.compile(r"(^|/)(tests?|testing|_?vendor(ed)?|third_?party(_files)?)/")
# Parsing is slow, and a file without a long triple-quoted string has no document.
_LONG_STRING = re.compile(rb'"""(?:[^"]|"(?!"")){200,}|' + rb"'''(?:[^']|'(?!'')){200,}")
_Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@final
class Docstrings(TextSource):
    """Docstrings of modules, classes and functions that are long prose."""

    licence = "the packages' own: BSD-3-Clause, Apache-2.0, MIT and PSF-based"
    is_shuffled = True  # files are sorted by their hash
    is_grouped = True  # by file: a module's docstrings repeat each other

    def identity(self, data: DataConfig) -> Any:  # noqa: ARG002
        """Return versions, and the sha256 of every file as the installer recorded it."""
        packages = {}
        for name in PACKAGES:
            installed = _get_distribution(name)
            files = _list_python_files(installed)
            lines = "\n".join(f"{path} {digest}" for path, digest, _ in files)
            digest = hashlib.sha256(lines.encode()).hexdigest()
            packages[name] = {"version": installed.version, "files": digest}
        # What the parser rejects and how docstrings are cleaned depends on Python's version.
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        return {"packages": packages, "python": python}

    def units(self, data: DataConfig, progress: ProgressCallback) -> Iterator[TextUnit]:  # noqa: ARG002
        files = [file for name in PACKAGES for file in _list_python_files(_get_distribution(name))]
        files.sort(key=lambda file: hashlib.sha256(f"{file[0]} {file[1]}".encode()).digest())
        for start in range(0, len(files), _UNIT_FILES):
            part = files[start : start + _UNIT_FILES]
            key = " ".join(f"{name} {digest}" for name, digest, _ in part)
            yield {"key": f"docstrings {key}", "files": [[path, name] for name, _, path in part]}

    def read(self, unit: TextUnit) -> Iterator[tuple[str, str | None]]:
        for path, name in unit["files"]:
            try:
                raw = Path(path).read_bytes()
            except OSError as error:
                text = f"{path} cannot be read ({error.strerror})"
                raise DataError(f"{text}; reinstall its package") from None
            for text in extract_docstrings(raw):
                yield text, name


def extract_docstrings(source: bytes) -> Iterator[str]:
    """Yield the long prose docstrings of one Python file, in their order in the file.

    A file that this Python cannot parse, such as one for a newer version, has none.
    """
    if not _LONG_STRING.search(source):
        return
    try:
        with warnings.catch_warnings():  # invalid escapes in other people's strings
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in _iter_definitions(tree):
        text = ast.get_docstring(node)
        if text is not None and is_prose(text):
            yield text


def is_prose(text: str) -> bool:
    """Return whether ``text`` is long enough and mostly letters and spaces."""
    if len(text) < MIN_CHARACTERS:
        return False
    words = sum(letter == " " or letter.isalpha() for letter in text)
    return words >= MIN_PROSE * len(text)


def _iter_definitions(node: ast.AST) -> Iterator[_Definition]:
    """Yield ``node`` and the definitions inside it. Expressions, most of a tree, are skipped."""
    if isinstance(node, _Definition):
        yield node
    for field in ("body", "orelse", "finalbody", "handlers"):
        for child in getattr(node, field, None) or ():
            if isinstance(child, ast.stmt | ast.ExceptHandler):
                yield from _iter_definitions(child)


def _get_distribution(name: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError:
        text = f"data.source = docstrings reads the package {name}, which is not installed"
        raise DataError(f"{text}; run pip install {name}, or use source: files") from None


def _list_python_files(installed: Distribution) -> list[tuple[str, str, str]]:
    """Return relative path, sha256 and absolute path of every source file, sorted."""
    record = installed.read_text("RECORD")
    if record is None:
        text = f"{installed.metadata['Name']} was installed without a list of its files"
        raise DataError(f"{text}; install it with pip, or use data.source: files")
    root = str(installed.locate_file(""))
    files = []
    for line in record.splitlines():
        name, _, rest = line.partition(",")
        is_outside = name.startswith(("..", "/"))
        if name.endswith(".py") and not is_outside and not _EXCLUDED_PATHS.search(name):
            path = f"{root}/{name}"
            files.append((name, rest.partition(",")[0] or file_sha256(path), path))
    return sorted(files)
