"""The reference of the YAML files: every key is described, and every example loads."""

import re
from pathlib import Path

import pytest
import yaml

from kvlab.cli.main import main
from kvlab.errors import KvlabError
from kvlab.extensions.reference.key_reference import (
    format_key_reference,
    json_schema,
    list_key_sections,
)
from kvlab.spec import load_experiment, load_sweep
from kvlab.spec.yaml_reader import parse_yaml
from tests.support.extensions import find_missing

KEYS = {
    f"{kind} {key.path}": (kind, key)
    for kind in ("experiment", "sweep")
    for _, _, keys in list_key_sections(kind)
    for key in keys
}
EXPERIMENT = "name: small\nmodel: {}\ntraining: {tokens: 20e6}\n"
FACTORS = {
    "heads": "{mha: {}, mqa: {model.n_kv_head: 1}}",
    "position": "{learned: {}, rope: {model.position: rope}}",
    "horizon": "{global: {}, hybrid: {model.window: 256, model.attention_pattern: GLLLLL}}",
    "mlp": "{gelu: {}, swiglu: {model.mlp: swiglu}}",
    "sharing": '{none: {}, tied: {serving.tie: "adjacent:2"}}',
    "window": "{small: {}, large: {model.vocab_size: 50304}}",
    "width": "{narrow: {}, wide: {model.ffn_dim: 4096}}",
    "model": "{s: {model.n_layer: 2}, m: {model.n_layer: 4}, l: {model.n_layer: 6}}",
}
"""Factors for the examples of sweeps to name."""


def complete_sweep(example: str) -> str:
    """Return a sweep that holds an example and what else a sweep must have."""
    written = yaml.safe_load(example)
    base = {"question": "What does it cost?", "experiment": "../experiments/small.yaml"}
    lines = [f"{key}: {value}" for key, value in base.items() if key not in written]
    if not {"factors", "search"} & written.keys():
        named = [name for name in FACTORS if re.search(rf"\b{name}\b(?!\.)", example)]
        names = dict.fromkeys(["heads", *named])
        lines += ["factors:", *(f"  {name}: {FACTORS[name]}" for name in names)]
    return "\n".join([*lines, example, ""])


def complete_experiment(example: str) -> str:
    written = yaml.safe_load(example)
    missing = [line for line in EXPERIMENT.splitlines() if line.split(":")[0] not in written]
    return "\n".join([*missing, example, ""])


def test_every_key_has_a_description_a_unit_if_it_is_a_number_and_a_default():
    for name, (_, key) in KEYS.items():
        assert re.fullmatch(r"\S.*[.)]", key.description), f"{name}: a sentence"
        is_number = re.match(r"(list\[|one of [^[]* or )?(whole )?number", key.type) is not None
        is_seed = key.path.endswith(("seed", "seeds", "seeds.first"))
        assert bool(key.unit) == (is_number and not is_seed), f"{name}: unit {key.unit!r}"
        assert key.default is None or key.default.strip("` "), f"{name}: in words or as YAML"


def test_every_example_loads_and_sets_its_key(tmp_path):
    for folder in ("experiments", "sweeps"):
        (tmp_path / folder).mkdir()
    experiment, sweep = tmp_path / "experiments" / "small.yaml", tmp_path / "sweeps" / "s.yaml"
    for kind, key in KEYS.values():
        try:
            if kind == "experiment":
                experiment.write_text(complete_experiment(key.example))
                load_experiment(experiment)
            else:
                experiment.write_text(EXPERIMENT)
                sweep.write_text(complete_sweep(key.example))
                load_sweep(sweep)
        except KvlabError as error:
            assert any(f"kvlab/extensions/{name}," in str(error) for name in find_missing("all"))
        assert re.search(rf"\b{re.escape(key.path.split('.')[-1])}:\s", key.example)


def test_the_command_prints_every_key_once(capsys):
    assert main(["schema", "--doc"]) == 0
    text = capsys.readouterr().out
    assert text == f"{format_key_reference('experiment')}\n{format_key_reference('sweep')}"
    headings = re.findall(r"^### `(.*)`$", text, re.MULTILINE)
    assert headings == [key.path for _, key in KEYS.values()]
    assert main(["schema", "sweep", "--doc"]) == 0
    assert capsys.readouterr().out == format_key_reference("sweep")


def test_editors_get_standard_bounds_and_the_facts_in_descriptions():
    definitions = json_schema("experiment")["$defs"]
    n_layer = definitions["ModelConfig"]["properties"]["n_layer"]
    assert (n_layer["minimum"], n_layer["maximum"]) == (1, 10_000)
    assert not {"ge", "le"} & n_layer.keys()
    n_kv_head = definitions["ModelConfig"]["properties"]["n_kv_head"]
    assert n_kv_head["description"].endswith("Default: n_head. Unit: heads.")
    assert definitions["BenchmarkConfig"]["properties"]["batch_sizes"]["minItems"] == 1
    leftover = {"unit", "computed_default", "given"}
    fields = [field for one in definitions.values() for field in one["properties"].values()]
    assert not any(leftover & field.keys() for field in fields)


def test_editors_accept_shipped_experiments_and_forms_of_files():
    jsonschema = pytest.importorskip("jsonschema")
    editor = jsonschema.Draft202012Validator(json_schema("experiment"))
    root = Path(__file__).parents[3]
    paths = [*root.glob("experiments/*.yaml"), root / "docs" / "extend" / "half_values.yaml"]
    for path in paths:
        written = parse_yaml(path.read_text(), path.name).data
        for form in ("separate", "of_a_file", {"of_a_file": {"size": 4}}):
            model = written.get("model") or {}
            assert not [*editor.iter_errors({**written, "model": {"kv": form} | model})], path
        assert [*editor.iter_errors({**written, "model": {"kv": 4}})]
