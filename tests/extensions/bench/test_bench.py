"""`kvlab bench`: variants, JSON lines, plots, and refusals."""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kvlab.benchmark import measurement
from kvlab.benchmark.measurement import Measurement, StopRule, TableLayout
from kvlab.cli.main import main
from kvlab.extensions.bench import command, variants
from kvlab.own_extensions import find_files
from kvlab.spec.benchmark_config import MEASURES, MeasureEntry
from kvlab.store import Store
from tests.support.extensions import needs
from tests.support.tiny_sweep import run_kvlab

SMALL = """
name: small
model: {vocab_size: 257, block_size: 64, n_layer: 2, n_head: 2, n_embd: 16}
data: {tokenizer: bytes}
benchmark: {prompt_tokens: 16, new_tokens: 4}
"""
QUICK = ["--new-tokens", "2", "--rounds", "2", "2", "--batches", "1", "2", "--device", "cpu"]


@pytest.fixture
def small(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    (tmp_path / "small.yaml").write_text(SMALL)
    return "small.yaml"


def test_variants_side_by_side_as_json_lines(small):
    words = ["--compare", "model.n_kv_head=1", "--only", "memory", "latency", "throughput"]
    code, out, err = run_kvlab("bench", small, *words, "--contexts", "4", "16", *QUICK, "--json")
    assert (code, err) == (0, "")
    lines = [Measurement.model_validate_json(line) for line in out.splitlines()]
    assert {line.variant for line in lines} == {small, f"{small} model.n_kv_head=1"}
    exact = {line.variant: line.value for line in lines if line.metric == "kv_formula"}
    assert list(exact.values()) == [2 * 64 * 2 * 16 * 4, 2 * 64 * 2 * 8 * 4]
    assert {line.prompt_tokens for line in lines if line.metric == "ttft"} == {4, 16}
    tpot = next(line for line in lines if line.metric == "tpot")
    assert [quantile.q for quantile in tpot.quantiles] == [0.5, 0.95, 0.99]
    assert (tpot.rounds, tpot.samples) == (2, 4)


def test_tables_and_plots(small, tmp_path):
    words = ["--only", "memory", "latency", "--contexts", "4", "16", *QUICK, "--plots", "drawn"]
    code, out, _ = run_kvlab("bench", small, *words)
    assert code == 0
    assert "latency at batch 1" in out
    assert "16 KiB" in out, "2 slots of 64 tokens, 2 x 16 of 4 bytes"
    drawn = {path.name for path in (tmp_path / "drawn").iterdir()}
    assert {"first-token.svg", "token-by-context.png", "token-without-cache.svg"} <= drawn


@pytest.mark.parametrize(
    ("changes", "dtype", "expected"),
    [
        ({"training.precision": "bfloat16"}, None, "bfloat16"),
        ({"training.precision": "bfloat16"}, "float32", "float32"),
        ({}, None, "float32"),
    ],
)
def test_on_a_gpu_an_experiment_is_measured_in_its_trainings_precision(
    tmp_path, monkeypatch, changes, dtype, expected
):
    monkeypatch.setattr(variants, "GPT", lambda *_, dtype, **__: SimpleNamespace(
        eval=lambda: SimpleNamespace(dtype=dtype)))  # fmt: skip
    factory = variants.VariantFactory(Store(tmp_path), "cuda")
    of = partial(factory.make_variant, name="of", dtype=dtype)
    assert of("experiments/quickstart.yaml", changes).model.dtype == getattr(torch, expected)
    if not changes:
        assert of("gpt2", {}).model.dtype == torch.float32


def test_dtypes_are_variants_and_the_cores_of_an_experiment_are_the_threads(small, monkeypatch):
    numbers = []
    monkeypatch.setattr("torch.set_num_threads", numbers.append)
    Path("wide.yaml").write_text(SMALL + "resources: {cpus: 2}\n")
    words = ["bench", small, "wide.yaml", "--only", "memory", *QUICK, "--json"]
    code, out, err = run_kvlab(*words, "--dtype", "float32", "bfloat16")
    assert (code, numbers) == (0, [1])
    assert "measured on 1 thread, though wide.yaml asks for 2" in err
    lines = [json.loads(line) for line in out.splitlines()]
    stored = {line["dtype"]: line["value"] for line in lines if line["metric"] == "kv_storage"}
    assert stored == {"float32": 2 * 64 * 2 * 16 * 4, "bfloat16": 2 * 64 * 2 * 16 * 2}
    run_kvlab(*words, "--threads", "2")
    assert numbers == [1, 2]


@needs("reference")
def test_the_schema_only_grows(capsys):
    """Every field, type and value that a line may have stays; nothing more becomes required."""
    assert main(["schema", "measurement"]) == 0
    name = "measurement.schema.json"
    old = json.loads(Path(measurement.__file__).with_name(name).read_text())
    new = json.loads(capsys.readouterr().out)
    parts = old["properties"].pop("part")["enum"]
    for path in find_files(name):  # what extensions add
        added = json.loads(path.read_text())["properties"]
        parts += added.pop("part")["enum"]
        old["properties"] |= added
    assert set(parts) <= set(new["properties"]["part"]["enum"])
    for one in (old, new):
        for field in (*one["properties"].values(), *one["$defs"].values()):
            field.pop("description", None)
    assert old["properties"].items() <= new["properties"].items()
    assert old["$defs"].items() <= new["$defs"].items()
    assert set(old["required"]) == set(new["required"])


def test_a_batch_that_cannot_fit_is_named_before_and_while_it_is_measured(small, monkeypatch):
    words = ["bench", small, "--only", "throughput", "--device", "cpu", "--new-tokens", "2"]
    words += ["--batches", str(10**12)]
    code, out, err = run_kvlab(*words)
    assert (code, out, f"batch {10**12} does not fit" in err) == (2, "", True)
    monkeypatch.setattr(variants, "check_caches_fit", lambda _session: None)  # it saw enough
    code, _, err = run_kvlab(*words)
    assert code == 2
    assert f"batch {10**12} does not fit on this cpu; use smaller --batches" in err


def test_nothing_measured_is_worth_a_look(small):
    code, out, err = run_kvlab("bench", small, "--only", "task", *QUICK)
    assert (code, out, "--text PATH" in err) == (1, "", True)


def test_a_part_that_only_names_takes_its_own_option():
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    for name, entry in MEASURES.items():
        if not entry.added_by:
            continue
        value = "turns=2" if entry.options else "1GiB"
        words = ["gpt2", "--only", name, f"--{entry.added_by}", value]
        assert command._select_measures(parser.parse_args(words)) == [name]


def test_by_default_it_stops_as_the_benchmark_does():
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command._make_settings(parser.parse_args(["gpt2"]), [], 64).stop_rule == StopRule()


@needs("conversations")
def test_a_load_that_is_given_changes_that_of_the_target(small):
    few = "{turns: 2, system_tokens: 4, prompt_tokens: 4, reply_tokens: 4, seed: 3, count: 5}"
    load = f"new_tokens: 4, conversations: {few}"
    Path(small).write_text(SMALL.replace("new_tokens: 4", load))
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    options = parser.parse_args([small, "--load", "count=7"])
    found = command._read_measure_options(options, [], 64)["conversations"]
    assert (found.seed, found.count, found.turns.mean) == (3, 7, 2)


def test_a_new_measure_is_offered_and_printed(small, monkeypatch):
    module = ModuleType("toy_measure")
    module.TABLES = (TableLayout("layers of all", {}, {"layers": "layers"}),)

    def measure(session):
        for variant in session.variants:
            count = variant.model.config.n_layer
            yield session.make_line("layers", "layers", variant, count, "", exact=True)

    module.measure = measure
    monkeypatch.setitem(sys.modules, "toy_measure", module)
    monkeypatch.setitem(MEASURES, "layers", MeasureEntry("toy_measure", "count layers", "parts"))
    words = ["bench", small, "--only", "layers", "--device", "cpu"]
    assert json.loads(run_kvlab(*words, "--json")[1])["value"] == 2
    assert "layers of all" in run_kvlab(*words)[1]
    monkeypatch.delitem(MEASURES, "layers")
    with pytest.raises(SystemExit):
        main(words)
