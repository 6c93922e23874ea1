"""Pages of the site: those that follow from the code, and examples that must agree with it."""

import io
import re
import sys
from contextlib import redirect_stdout
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from kvlab.cli.commands import COMMANDS
from kvlab.model import GPT
from kvlab.sharing import PATTERNS
from kvlab.spec import ModelConfig, ServingConfig
from kvlab.spec.designs import DESIGNS
from tests.support.extensions import find_missing

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def generate():
    if missing := find_missing("reference"):
        pytest.skip(f"without {missing}")
    spec = spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_every_pattern_and_every_design_has_its_pictures(generate):
    patterns = generate.describe_patterns()
    assert re.findall(r"^## `(.*)`$", patterns, re.M) == [p.usage for p in PATTERNS.values()]
    assert patterns.count("<svg") == len(PATTERNS) * len(generate.KINDS)
    designs = generate.describe_designs()
    headings = [h.partition(":")[0] for h in re.findall(r"^## `(.*)`$", designs, re.M)]
    assert headings == list(DESIGNS)
    assert "One-factor-at-a-time: 4 of 8 cells" in designs
    assert "resolution III" in designs, "notes of the fraction"


def test_the_help_of_every_command_is_a_page(generate):
    page = generate.describe_commands()
    assert re.findall(r"^## `kvlab (.*)`$", page, re.M) == list(COMMANDS)
    assert page.count("usage: kvlab") == len(COMMANDS)


def test_pages_are_written_once_and_the_same(generate, tmp_path):
    folder = tmp_path / "generated"
    generate.write_pages(folder)
    first = {path: (path.read_text(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    assert {path.name for path in first} >= {"sweep.md", "metrics.md", "python.md"}
    generate.write_pages(folder)
    assert {path: (path.read_text(), path.stat().st_mtime_ns) for path in first} == first


def read_layers(rule):
    """Return by layer whose K/V it reads: of the newest token, and of those before it.

    Every layer writes its own number as K and V, token by token, through the cache that serves.
    """
    config = ModelConfig(n_layer=4, n_head=1, n_embd=2, block_size=8, vocab_size=4)
    serving = ServingConfig(tie="adjacent:2", tie_rule=rule)
    cache, read = GPT(config).new_cache(1, 8, serving), {}
    for _ in range(6):
        attention_pass = cache.begin_pass(1)
        for layer in range(4):
            if attention_pass.writes_kv(layer):
                own = torch.full((1, 1, 1, 2), float(layer))
                attention_pass.write_kv(layer, own, own)
            *past, newest = attention_pass.read_kv(layer).parts[0][0, 0, :, 0].int().tolist()
            read[layer] = (newest, set(past))
            attention_pass.end_layer(layer)
        attention_pass.finish()
    return read


def test_the_example_of_tie_rules_is_what_the_cache_does():
    page = (DOCS / "tie-rules.md").read_text()
    rows = re.findall(r"^\| (\d) \| \d " + r"\| K/V of layer (\d) " * 4 + r"\|$", page, re.M)
    assert len(rows) == 4
    overwrite, owner = read_layers("overwrite"), read_layers("owner")
    for layer, *numbers in (map(int, row) for row in rows):
        newest, past, owner_newest, owner_past = numbers
        assert overwrite[layer] == (newest, {past})
        assert owner[layer] == (owner_newest, {owner_past})


def test_the_page_of_python_prints_what_it_shows(monkeypatch):
    monkeypatch.chdir(DOCS.parent)
    page = (DOCS / "python.md").read_text()
    blocks = re.findall(r"```(python|text)\n(.*?)```", page, re.S)
    names, printed = {}, ""
    for kind, block in blocks:
        if kind == "text":
            assert [line.rstrip() for line in printed.splitlines()] == block.splitlines()
            continue
        with redirect_stdout(io.StringIO()) as out:
            exec(compile(block, "docs/python.md", "exec"), names)
        printed = out.getvalue()
    assert [kind for kind, _ in blocks].count("text") == 3
