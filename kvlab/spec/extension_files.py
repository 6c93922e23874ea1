"""`extensions:` of an experiment: Python files beside the YAML that add members to kvlab's tables.

A file ends with ``extension = Extension(...)``, which lists what it adds. Its text goes into the
experiment, and so into the record and to every worker, which run it from there. A text that comes
from a record is not run before somebody on this machine has run it from a file: see `trust`.
"""

import ast
import errno
import hashlib
import inspect
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NoReturn

from pydantic import BeforeValidator, PlainSerializer, ValidationError, WithJsonSchema

from kvlab.errors import Problem, SpecError
from kvlab.humanize import suggest_name
from kvlab.own_extensions import explain_missing, find_members
from kvlab.spec import spec_model as spec
from kvlab.spec.data_config import SOURCES
from kvlab.spec.dtypes import DTYPES
from kvlab.spec.kv_forms import NAMED_FORMS, KVForm
from kvlab.spec.members import Member, MemberError, check_returns, offered
from kvlab.spec.mixers import MIXERS, Mixer
from kvlab.spec.quantizers import Quantizer
from kvlab.spec.source_options import DocumentSource, SourceOptions
from kvlab.spec.token_metrics import TokenMetric
from kvlab.syntax_digest import DIGEST_LENGTH, digest_source

KINDS: dict[str, type[Member]] = {
    "kv_forms": KVForm,
    "mixers": Mixer,
    "metrics": TokenMetric,
    "sources": DocumentSource,
    "quantizers": Quantizer,
    **find_members("file_members"),
}
"""What a file may add: argument of `Extension` -> base class of its members."""


class Extension:
    """What a file adds.

    Args:
        kinds: a tuple of members for each kind of `KINDS` that it adds to: ``kv_forms``, values of
            ``model.kv``; ``mixers``, of ``mixer`` in ``model.kinds``; ``metrics``, which trials
            measure beside the rest; ``sources``, values of ``data.source``; ``quantizers``, of
            ``kv_dtype``; and those of kvlab's extensions.

    Raises:
        TypeError: there is no such kind.
    """

    def __init__(self, **kinds: tuple[Any, ...]):
        for unknown in kinds.keys() - KINDS.keys():
            hint = explain_missing(unknown) or suggest_name(unknown, KINDS)
            raise TypeError(f"{unknown} is no kind of members; {hint}")
        self.kinds = kinds

    @property
    def members(self) -> tuple[Member, ...]:
        """All that it adds."""
        return tuple(chain(*self.kinds.values()))


class ExtensionFile(spec.SpecModel):
    """One file of `Experiment.extensions`."""

    name: str
    """Its name, without its folder. Example: my_attention.py"""
    text: str
    """All of it. Example: ''"""

    @cached_property
    def digest(self) -> str:
        """Hex digits of its syntax tree: comments, docstrings and layout do not count."""
        return digest_source(self.text)[:DIGEST_LENGTH]


def _read_files(value: Any) -> Any:
    if value == []:
        return ()
    if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
        return tuple(ExtensionFile(name=name, text=text) for name, text in value.items())
    return value


Extensions = Annotated[
    tuple[ExtensionFile, ...],
    BeforeValidator(_read_files),
    PlainSerializer(lambda files: {file.name: file.text for file in files}),
    WithJsonSchema({"type": "array", "items": {"type": "string"}}),
]
"""Files by their name; in YAML a list of names, which the loader reads."""

_trusted = set[str]()
_loaded = dict[ExtensionFile, Extension]()


def trust(*texts: str) -> None:
    """Let this process run these texts of files."""
    _trusted.update(texts)


def read_extension(path: Path) -> ExtensionFile:
    """Read a file that the user names, and run it.

    Raises:
        OSError: it cannot be read.
        SpecError: as of `load_extension`.
    """
    try:
        file = ExtensionFile(name=path.name, text=path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        raise OSError(errno.EINVAL, "it is no text in UTF-8") from None
    trust(file.text)
    load_extension(file, path)
    return file


def load_extension(file: ExtensionFile, path: str | Path | None = None) -> Extension:
    """Run a file, once in a process, and return what it adds.

    Args:
        path: where it lies, for errors; default its name.

    Raises:
        SpecError: it fails, or adds what cannot be added; with its line.
    """
    if file in _loaded:
        return _loaded[file]

    def fail(line: int, text: str, column: int = 1) -> NoReturn:
        raise SpecError([Problem(str(path or file.name), line, column, text)])

    shown = f"<{file.name}>"  # a traceback shows its lines where the file is not, too
    linecache.cache[shown] = (len(file.text), None, file.text.splitlines(keepends=True), shown)
    try:
        digest = hashlib.sha256(file.text.encode()).hexdigest()  # options are pickled by its name
        module = ModuleType(f"kvlab_extension_{digest[:DIGEST_LENGTH]}")
        sys.modules[module.__name__] = module
        with redirect_stdout(sys.stderr):  # standard output may be JSON
            exec(compile(file.text, shown, "exec"), module.__dict__)
            extension = module.__dict__.get("extension")
            if isinstance(extension, Extension):
                _check_members(file.text, module, extension, fail)
    except SpecError:
        raise
    except SyntaxError as error:
        fail(error.lineno or 1, f"is no Python: {error.msg}", error.offset or 1)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((one.lineno for one in reversed(frames) if one.filename == shown), None)
        text = f"fails: {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and _is_beside(path, error.name):
            text = f"imports {error.name} beside it, which workers and records lack; put it here"
        fail(line or 1, text)
    if not isinstance(extension, Extension):
        text = "has no `extension`; end it with `extension = Extension(kv_forms=(MyForm(),))`"
        fail(max(1, len(file.text.splitlines())), text)
    for own in {type(member) for member in extension.members}:
        own.source = file
        check_returns(own)
    for member in extension.members:
        if not isinstance(member, DocumentSource) and member.options is not None:
            member.__dict__["options"] = member.options()  # a mixer may be frozen
    _loaded[file] = extension
    return extension


def _is_beside(path: str | Path | None, module: str | None) -> bool:
    return path is not None and bool(module) and Path(path).with_name(f"{module}.py").exists()


def _check_members(
    text: str, module: ModuleType, extension: Extension, fail: Callable[[int, str], NoReturn]
) -> None:
    """Refuse members that cannot be told apart or have no module of torch."""
    names = {*NAMED_FORMS, *MIXERS, *SOURCES, *DTYPES, "model", ""}
    names |= set(chain(*(base.own_names for base in KINDS.values())))
    lines, last = _list_class_lines(ast.parse(text)), max(1, len(text.splitlines()))
    for field, members in extension.kinds.items():
        base = KINDS[field]
        if not isinstance(members, tuple):
            fail(last, f"{field} = {members!r} is not a tuple; write it as in (MyForm(),)")
        for member in members:
            if isinstance(member, type):
                hint = f"which is a class; write {member.__name__}()"
                fail(lines.get(member.__name__, last), f"{field} has {member.__name__}, {hint}")
            own, line = type(member), lines.get(type(member).__name__, last)
            if not isinstance(member, base) or own.__module__ != module.__name__:
                hint = f"give instances of {base.__name__}s that this file defines"
                fail(line, f"{field} has {member!r}; {hint}")
            name = getattr(member, "name", None)
            if not isinstance(name, str) or name in names:
                hint = (
                    "which is taken; choose another" if name in names else "not a text; write one"
                )
                fail(line, f"{own.__name__} has name = {name!r}, {hint}")
            names.add(name)
            _check_options(member, partial(fail, line))
            if problem := _find_method_problem(member, base):
                fail(line, f"{own.__name__} {problem}")
            if problem := member.find_definition_problem(module, text):
                fail(line, f"{own.__name__} {problem}")


def _find_method_problem(member: Member, base: type[Member]) -> str | None:
    """Return which name is kvlab's, or no method that takes what that of ``base`` does."""
    for name in vars(type(member)).keys() & vars(Member).keys() - {"name", "options"}:
        if not name.startswith("__"):
            return f"has {name}, which kvlab uses itself; rename it"
    for name, declared in vars(base).items():
        if not inspect.isfunction(declared) or name.startswith("_"):
            continue
        given, own = inspect.signature(declared), getattr(member, name)
        try:
            if "*" not in str(given):  # of a quantizer's decode its `stored` says how many
                inspect.signature(own).bind(*list(given.parameters)[1:])
        except (TypeError, ValueError):
            found = f"{name}{inspect.signature(own)}" if callable(own) else f"{name} = {own!r}"
            return f"has {found}; write it as def {name}({', '.join(given.parameters)})"
    return None


def _check_options(member: Member, fail: Callable[[str], NoReturn]) -> None:
    options, own = member.options, type(member).__name__
    if missing := sorted(getattr(options, "__abstractmethods__", ())):
        fail(f"{own} has options without {', '.join(missing)}; define it as a property")
    try:
        is_usable = options is None or issubclass(options, spec.SpecModel)
        defaults = options and options()
        hash(defaults)
    except (TypeError, ValidationError):
        is_usable = False
    if not is_usable:
        hint = "name a SpecModel with a default for each field, and tuples in place of lists"
        fail(f"{own} has options = {getattr(options, '__name__', options)}; {hint}")
    if isinstance(defaults, SourceOptions) and (problem := defaults.find_symbol_problem()):
        fail(f"{own} has options with {problem}")


@contextmanager
def offer_extensions(data: Any) -> Iterator[None]:
    """Offer what ``extensions`` in the data of an experiment adds, while it is validated."""
    files = _read_files(data.get("extensions", ())) if isinstance(data, dict) else ()
    members, homes = list[Member](), dict[tuple[str, str], str]()
    for file in files if isinstance(files, tuple) else ():  # else its field says what is wrong
        if file.text not in _trusted:
            text = f"has {file.name}, code of a record that nobody has run on this machine; read"
            spec.raise_problems([("extensions", f"{text} it, then run `kvlab check` on it")])
        for kind, added in load_extension(file).kinds.items():
            for one in added:
                home = homes.setdefault((kind, one.name), file.name)
                if home != file.name:
                    text = f"has {one.name} in {home} and in {file.name}; rename one of them"
                    spec.raise_problems([("extensions", text)])
            members += added
    token = offered.set(tuple(members))
    try:
        yield
    except ValidationError:
        raise
    except Exception as error:
        if (described := describe_error(error)) is None:
            raise
        spec.raise_problems([("extensions", f"has {described}")])
    finally:
        offered.reset(token)


def _list_class_lines(tree: ast.Module) -> dict[str, int]:
    return {node.name: node.lineno for node in tree.body if isinstance(node, ast.ClassDef)}


def describe_error(error: BaseException) -> str | None:
    """Return an error of a loaded file with its place, ``file.py:12``; None if it is of no file."""
    if (place := locate_error(error)) is None:
        return None
    fails = "" if isinstance(error, MemberError) else f"fails: {type(error).__name__}: "
    return f"{place}: {fails}{error}"


def locate_error(error: BaseException) -> str | None:
    """Return the last place in a loaded file that an error passed, as ``file.py:12``; or None.

    Of a `MemberError` it is the class.
    """
    if isinstance(error, MemberError):
        file, kind = error.member.source, type(error.member).__name__
        return f"{file.name}:{_list_class_lines(ast.parse(file.text)).get(kind, 1)}"
    shown = {f"<{file.name}>": file.name for file in _loaded}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in shown:
            return f"{shown[frame.filename]}:{frame.lineno}"
    return None


def restore_member(kind: str, name: str, file: Mapping[str, str], options: Any = None) -> Member:
    """Return a member of a file where it is unpickled: the process may not have run the file."""
    own = ExtensionFile(**file)
    trust(own.text)
    members = load_extension(own).members
    found = next(one for one in members if (type(one).__qualname__, one.name) == (kind, name))
    return found if options is None else found.with_options(options)
