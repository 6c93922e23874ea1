"""`extensions:` of an experiment: Python files beside the YAML that add members to kvlab's tables.

A file ends with ``extension = Extension(...)``, which lists what it adds. Its text goes into the
experiment, and so into the record and to every worker, which run it from there. A text that comes
from a record is not run before somebody on this machine has run it from a file: see `trust`.
"""

import ast
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NoReturn

from pydantic import BeforeValidator, PlainSerializer, ValidationError, WithJsonSchema

from kvlab.errors import Problem, SpecError
from kvlab.spec import spec_model as spec
from kvlab.spec.kv_forms import NAMED_FORMS, KVForm, StoredVectors, offered_forms
from kvlab.spec.model_config import ModelConfig
from kvlab.syntax_digest import DIGEST_LENGTH, digest_source


@dataclass(frozen=True)
class Extension:
    """What a file adds. Each part is optional.

    Args:
        kv_forms: values of ``model.kv``.
    """

    kv_forms: tuple[KVForm, ...] = ()


class ExtensionFile(spec.SpecModel):
    """One file of `Experiment.extensions`."""

    name: str
    """Its path, as it was written. Example: my_attention.py"""
    text: str
    """All of it. Example: ''"""

    @cached_property
    def digest(self) -> str:
        """Hex digits of its syntax tree: comments, docstrings and layout do not count."""
        return digest_source(self.text)[:DIGEST_LENGTH]


_WRITTEN = {
    "type": "array", "items": {"type": "string"}, "examples": [[]], "default": [],
    "description": "Python files beside this one that add values of other keys, such as forms of "
    "K/V. Their text is part of the trial's id and of the record.",
}  # fmt: skip


def _read_files(value: Any) -> Any:
    if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
        return tuple(ExtensionFile(name=name, text=text) for name, text in value.items())
    return value


Extensions = Annotated[
    tuple[ExtensionFile, ...],
    BeforeValidator(_read_files),
    PlainSerializer(lambda files: {file.name: file.text for file in files}),
    WithJsonSchema(_WRITTEN),
]
"""Files by their name; in YAML a list of names, which the loader reads."""

_trusted = set[str]()
_loaded = dict[ExtensionFile, Extension]()


def trust(*texts: str) -> None:
    """Let this process run these texts of files."""
    _trusted.update(texts)


def load_extension(file: ExtensionFile, path: str | Path | None = None) -> Extension:
    """Run a file, once in a process, and return what it adds.

    Args:
        path: where it lies, for errors; default its name.

    Raises:
        SpecError: it fails, or adds what cannot be added; with its line.
    """
    if file in _loaded:
        return _loaded[file]

    def fail(line: int, text: str) -> NoReturn:
        raise SpecError([Problem(str(path or file.name), line, 1, text)])

    shown = f"<{file.name}>"  # a traceback shows its lines where the file is not, too
    linecache.cache[shown] = (len(file.text), None, file.text.splitlines(keepends=True), shown)
    try:
        module = ModuleType(f"kvlab_extension_{file.digest}")
        sys.modules[module.__name__] = module
        exec(compile(file.text, shown, "exec"), module.__dict__)
    except SyntaxError as error:
        fail(error.lineno or 1, f"is no Python: {error.msg}")
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((one.lineno for one in reversed(frames) if one.filename == shown), None)
        fail(line or 1, f"fails: {type(error).__name__}: {error}")
    extension = module.__dict__.get("extension")
    if not isinstance(extension, Extension):
        text = "has no `extension`; end it with `extension = Extension(kv_forms=(MyForm(),))`"
        fail(max(1, len(file.text.splitlines())), text)
    _check_forms(file.text, module, extension, fail)
    for form in extension.kv_forms:
        type(form).source = file
    _loaded[file] = extension
    return extension


def _check_forms(
    text: str, module: ModuleType, extension: Extension, fail: Callable[[int, str], NoReturn]
) -> None:
    """Refuse forms that cannot be told apart or have no module of torch."""
    tree, names = ast.parse(text), set(NAMED_FORMS)
    lines = {node.name: node.lineno for node in tree.body if isinstance(node, ast.ClassDef)}
    for form in extension.kv_forms:
        own, line = type(form), lines.get(type(form).__name__, 1)
        if not isinstance(form, KVForm) or own.__module__ != module.__name__:
            text = f"kv_forms has {form!r}; give instances of classes of this file, which are"
            fail(line, f"{text} KVForms")
        name, view, parts = (getattr(form, key, None) for key in ("name", "view", "parts"))
        if not isinstance(name, str) or name in names:
            text = f"has name = {name!r}; give it one that no other form has"
            fail(line, f"{own.__name__} {text}: not {', '.join(sorted(names))}")
        if not isinstance(view, str) or not (":" in view or hasattr(module, view)):
            text = f"has view = {view!r}; name a class of this file, a SeparateKV"
            fail(line, f"{own.__name__} {text}")
        if not isinstance(parts, tuple) or not parts:
            text = f"has parts = {parts!r}; name what a token stores, such as ('k', 'v')"
            fail(line, f"{own.__name__} {text}")
        names.add(name)


@contextmanager
def offer_extensions(data: Any) -> Iterator[None]:
    """Offer what ``extensions`` in the data of an experiment adds, while it is validated."""
    files = _read_files(data.get("extensions", ())) if isinstance(data, dict) else ()
    forms = dict[str, KVForm]()
    for file in files if isinstance(files, tuple) else ():  # else its field says what is wrong
        if file.text not in _trusted:
            text = f"has {file.name}, code of a record that nobody has run on this machine; read"
            spec.raise_problems([("extensions", f"{text} it, then run `kvlab check` on it")])
        forms |= {form.name: form for form in load_extension(file).kv_forms}
    token = offered_forms.set(forms)
    try:
        yield
    except ValidationError:
        raise
    except Exception as error:
        if (place := locate_error(error)) is None:
            raise
        text = f"{place}: fails: {type(error).__name__}: {error}"
        spec.raise_problems([("extensions", f"has {text}")])
    finally:
        offered_forms.reset(token)


def find_form_problems(model: ModelConfig) -> spec.Problems:
    """Yield what a form of a user's file says that no cache can hold."""
    form = model.kv_form
    if form.source is None:
        return
    for layer in dict.fromkeys(model.layers):
        stored = form.stored(layer)
        are_vectors = isinstance(stored, tuple) and all(
            isinstance(one, StoredVectors) and one.count >= 1 and one.size >= 1 for one in stored
        )
        if not are_vectors or len(stored) != len(form.parts):
            text = f"stores {stored!r} in layers {layer.kind}; return one StoredVectors, of whole"
            yield "model.kv", f"{text} numbers above 0, for each of its parts {form.parts!r}"
            return


def locate_error(error: BaseException) -> str | None:
    """Return the last place in a loaded file that an error passed, as ``file.py:12``; or None."""
    shown = {f"<{file.name}>": file.name for file in _loaded}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in shown:
            return f"{shown[frame.filename]}:{frame.lineno}"
    return None


def restore_form(name: str, file: Mapping[str, str]) -> KVForm:
    """Return a form of a file, where one is unpickled: the process may not have run the file."""
    own = ExtensionFile(**file)
    trust(own.text)
    return next(form for form in load_extension(own).kv_forms if form.name == name)
