"""A digest of what Python code says, from its syntax tree: the same in every version of Python."""

import ast
import hashlib
from collections.abc import Iterator
from typing import Any

DIGEST_LENGTH = 16
"""Hex digits of a digest that is shown or kept."""


def digest_source(source: str | bytes) -> str:
    """Return 64 hex digits of what a module says, without comments, docstrings and layout.

    Raises:
        SyntaxError: it is no Python.
    """
    text = "\0".join(_walk(ast.parse(source)))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _walk(node: Any) -> Iterator[str]:
    """Yield a syntax tree in words. Fields that are empty are left out: versions add some."""
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return  # a docstring, of an attribute too
        case ast.JoinedStr(values=values):  # Python 3.12 adds empty parts
            yield from _walk(["f", *(one for one in values if getattr(one, "value", 0) != "")])
        case ast.AST():
            yield type(node).__name__
            for name in node._fields:
                value = getattr(node, name, None)
                if value is not None and value != []:
                    yield name
                    yield from _walk(value)
        case list():
            yield "["
            for one in node:
                yield from _walk(one)
            yield "]"
        case _:
            yield repr(node)
