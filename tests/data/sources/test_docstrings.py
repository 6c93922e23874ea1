"""`docstrings`: exact extraction, in an order of which every prefix is a fair sample."""

import ast
from pathlib import Path

import pytest

from kvlab.data.sources.docstrings import extract_docstrings, is_prose
from kvlab.spec import DataConfig
from tests.contracts.source_contract import SourceContract

PROSE = "This sentence is plain prose and says what a thing is for. " * 5
TABLE = "=== ==== ====\n 1.0  2.0  3.0\n" * 20


class TestDocstringsContract(SourceContract):
    @pytest.fixture
    def data(self):
        return DataConfig(source="docstrings")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (f'def f():\n    """Short."""\n    x = """{PROSE}"""\ndef g():\n    """{TABLE}"""\n', []),
        (f'def f():\n    """\n    {PROSE}\n\n        in\n    """\n', [f"{PROSE}\n\n    in"]),
        (f'def f(:\n    """{PROSE}"""', []),
        (f'\x00"""{PROSE}"""', []),
    ],
    ids=["tables and other strings", "indented", "no Python", "a byte 0"],
)
def test_only_long_prose_docstrings_are_documents(source, expected):
    assert list(extract_docstrings(source.encode())) == expected


NESTED = """{module}
class A:
    {class}
    def f(self):
        {method}
async def g():
    {async}
    def h():
        {nested}
if 1:
    def i():
        {in if}
else:
    try:
        pass
    except E:
        def k():
            {in except}
    def j():
        {in else}
"""
NAMES = ["module", "class", "method", "async", "nested", "in if", "in else", "in except"]


def test_docstrings_are_those_that_the_standard_library_finds():
    """Of modules, classes, functions and nested definitions; in a real file, too."""
    import numpy

    nested = NESTED.format_map({name: f"'''{name}. {PROSE}'''" for name in NAMES})
    real = (Path(numpy.__file__).parent / "lib/_function_base_impl.py").read_bytes()
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for raw, least in ((nested.encode(), len(NAMES)), (real, 20)):
        nodes = [node for node in ast.walk(ast.parse(raw)) if isinstance(node, kinds)]
        expected = {text for node in nodes if (text := ast.get_docstring(node)) and is_prose(text)}
        assert len(expected) >= least
        assert set(extract_docstrings(raw)) == expected
