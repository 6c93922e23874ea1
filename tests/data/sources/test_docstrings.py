"""`docstrings`: exact extraction, in an order of which every prefix is a fair sample."""

import ast
from itertools import islice
from pathlib import Path

import pytest

from kvlab.data.data_dir import ignore_progress
from kvlab.data.sources import get_source
from kvlab.data.sources.docstrings import MIN_CHARACTERS, extract_docstrings, is_prose
from kvlab.spec import DataConfig
from tests.contracts.source_contract import SourceContract

PROSE = "This sentence is plain prose and says what a thing is for. " * 5
TABLE = "=== ==== ====\n 1.0  2.0  3.0\n" * 20


class TestDocstringsContract(SourceContract):
    @pytest.fixture
    def data(self):
        return DataConfig(source="docstrings")


def test_docstrings_of_modules_classes_functions_and_nested_definitions():
    names = ["module", "class", "method", "async", "nested", "in if", "in else", "in except"]
    docs = {name: f'"""{name}. {PROSE}"""' for name in names}
    source = f"""{docs["module"]}
class A:
    {docs["class"]}
    def f(self):
        {docs["method"]}
async def g():
    {docs["async"]}
    def h():
        {docs["nested"]}
if 1:
    def i():
        {docs["in if"]}
else:
    try:
        pass
    except E:
        def k():
            {docs["in except"]}
    def j():
        {docs["in else"]}
"""
    found = {text.split(".")[0] for text in extract_docstrings(source.encode())}
    assert found == set(names)


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


def test_a_real_file_against_the_standard_library():
    import numpy

    raw = (Path(numpy.__file__).parent / "lib/_function_base_impl.py").read_bytes()
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(raw)) if isinstance(node, kinds)]
    expected = {text for node in nodes if (text := ast.get_docstring(node)) and is_prose(text)}
    assert len(expected) > 20
    assert set(extract_docstrings(raw)) == expected


def test_the_first_units_hold_prose_of_many_packages():
    source = get_source("docstrings")
    units = list(islice(source.units(DataConfig(), ignore_progress), 8))
    paths = [path for unit in units for path, _ in unit["files"]]
    packages = {path.split("site-packages/")[-1].split("/")[0] for path in paths}
    assert len(packages) >= 8
    assert not any("/tests/" in path for path in paths)
    texts = [text for text, _ in source.read(units[0])]
    assert min(map(len, texts)) >= MIN_CHARACTERS
    assert sum(" the " in text for text in texts) > len(texts) / 2
