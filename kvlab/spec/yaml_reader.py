"""YAML as plain data, with the line and column of every key and value.

Data only: anchors, aliases, tags, duplicate keys and several documents are errors, so a file
means what it shows and cannot grow when it is read. Scalars follow YAML 1.2's core schema
(`no` is a string, `10e9` is a number), not PyYAML's YAML 1.1.
"""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvlab.errors import Problem, SpecError
from kvlab.fs.atomic_files import read_regular

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_NODES = 20_000

Key = str | int
LineColumn = tuple[int, int]

_INT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*\Z")
_FLOAT = re.compile(r"[-+]?([0-9]+(_[0-9]+)*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?\Z")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|nan)\Z", re.IGNORECASE)
_CONSTANTS = {"true": True, "false": False, "null": None, "~": None, "": None}


@dataclass(frozen=True)
class YamlDocument:
    """A file's data, and the location of each part of it.

    ``locations`` maps a key path such as ``("model", "n_head")`` to the (line, column) of its
    value, ``key_locations`` to that of the key itself; both are 1-based. What stands at a key of
    ``moved`` was read from its value, another path of the file.
    """

    file: str
    data: dict[str, Any]
    locations: dict[tuple[Key, ...], LineColumn] = field(repr=False)
    key_locations: dict[tuple[Key, ...], LineColumn] = field(repr=False)
    text: str = field(default="", repr=False)
    moved: dict[tuple[Key, ...], tuple[Key, ...]] = field(default_factory=dict, repr=False)

    def problem(self, path: tuple[Key, ...], message: str, *, at_key: bool = False) -> Problem:
        """Return a problem at ``path``, or at its nearest ancestor that is in the file."""
        for target, source in self.moved.items():
            if path[: len(target)] == target:
                path = (*source, *path[len(target) :])
                break
        table = self.key_locations if at_key else self.locations
        while path and path not in table:
            path, table = path[:-1], self.locations
        line, column = table.get(path, (1, 1))
        return Problem(self.file, line, column, message)


class _Loader(yaml.SafeLoader):
    """PyYAML's parser with kvlab's limits; composes nodes, never constructs objects."""

    depth = nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]  # PyYAML's stubs stop here
        self.nodes += 1
        self.depth += 1
        problem = ""
        if isinstance(event, yaml.AliasEvent):
            problem = f"alias *{event.anchor}: specs hold plain data; write it out"
        elif getattr(event, "anchor", None):
            problem = f"anchor &{event.anchor}: specs hold plain data; remove it"
        elif getattr(event, "tag", None):
            problem = f"tag {event.tag}: specs hold plain data; remove it"
        elif self.nodes > MAX_NODES:
            problem = f"more than {MAX_NODES:,} keys and values; split it"
        elif self.depth > MAX_DEPTH:
            problem = f"nested deeper than {MAX_DEPTH} levels; flatten it"
        if problem:
            raise _NotPlainData(problem=problem, problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _NotPlainData(yaml.MarkedYAMLError):
    """The file uses YAML features beyond plain data, or is too large."""


def read_yaml(path: str | Path) -> YamlDocument:
    """Read one YAML file that holds a mapping."""
    file, raw, line = str(path), b"", 1
    try:
        raw = read_regular(path, MAX_BYTES + 1)
        if len(raw) <= MAX_BYTES:
            return parse_yaml(raw.decode("utf-8-sig"), file)
        message = f"is larger than {MAX_BYTES:,} bytes; split it"
    except OSError as error:
        message = f"cannot be read: {error.strerror}; check the path"
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        message = "is not UTF-8 text; save it as UTF-8"
    raise SpecError([Problem(file, line, 1, message)])


def parse_yaml(text: str, file: str) -> YamlDocument:
    """Parse a text as `read_yaml` parses a file; ``file`` is the name shown in problems."""
    node = _compose(text, file)
    if node is None:
        raise SpecError([Problem(file, 1, 1, "is empty; write at least the required keys")])
    if not isinstance(node, yaml.MappingNode):
        message = "is not a mapping; write `key: value` lines"
        raise SpecError([Problem(file, *_line_column(node), message)])
    document = YamlDocument(file, {}, {}, {}, text)
    problems: list[Problem] = []
    document.data.update(_convert_node(node, (), document, problems))
    if problems:
        raise SpecError(problems)
    return document


def _compose(text: str, file: str) -> Any:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        location = text.count("\n", 0, error.position) + 1, 1
        message = f"has the character #x{ord(text[error.position]):04x}, which YAML forbids"
        message = f"{message}; remove it"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        location = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        message = " ".join(str(error.problem or error.context).split())
        if not isinstance(error, _NotPlainData):
            message = f"is not valid YAML: {message}; check indentation and quotes"
    raise SpecError([Problem(file, *location, message)])


def _line_column(node: Any) -> LineColumn:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _convert_node(
    node: Any, path: tuple[Key, ...], doc: YamlDocument, problems: list[Problem]
) -> Any:
    doc.locations[path] = _line_column(node)
    if isinstance(node, yaml.SequenceNode):
        return [_convert_node(item, (*path, i), doc, problems) for i, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode):
        try:
            return _convert_scalar(node)
        except ValueError as error:
            problems.append(doc.problem(path, str(error)))
            return 0.0
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        place, key = _line_column(key_node), key_node.value
        if not isinstance(key_node, yaml.ScalarNode) or not key:
            problems.append(Problem(doc.file, *place, "a key must be a plain name"))
        elif key in result:
            problems.append(Problem(doc.file, *place, f"key {key!r} is duplicated here; keep one"))
        else:
            doc.key_locations[(*path, key)] = place
            result[key] = _convert_node(value_node, (*path, key), doc, problems)
    return result


def _convert_scalar(node: Any) -> Any:
    """Return the value of a scalar, or raise ValueError with what is wrong with it."""
    text = node.value
    if node.style is not None:  # quoted or block text is text, whatever it looks like
        return text
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.match(text) and len(text) < 40:
        return int(text)
    if _NOT_FINITE.match(text):
        raise ValueError(f"{text} is not a finite number; write one")
    if not _FLOAT.match(text):
        return text
    number = float(text.replace("_", ""))
    if math.isinf(number):
        raise ValueError(f"{text} is too large for a number")
    return number
