"""From a YAML with `training.init_from` to the report, with real training, in this process."""

import shutil
from functools import partial

import pytest
import torch

from kvlab.cli.main import main
from kvlab.errors import Stopped
from kvlab.model import GPT
from kvlab.spec import ModelConfig, load_sweep
from kvlab.store import Store
from kvlab.store.verification import verify_record
from kvlab.sweep import plan
from kvlab.train.tensor_files import read_final_weights
from kvlab.trial.run import run_task
from kvlab.trial.torch_trainable import TorchTrainable
from tests.support import tiny_sweep
from tests.support.extensions import find_missing, needs
from tests.support.stub_trials import drive
from tests.support.tiny_sweep import tiny_sweep_folder
from tests.support.trained_trial import make_random_model

SHAPE = {"vocab_size": 257, "block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 16}

RECIPE = "tokens: TOKENS, batch_tokens: 64, learning_rate: 2e-2,"
EXPERIMENT = tiny_sweep.EXPERIMENT.replace("n_embd: 8", "n_embd: 16")
EXPERIMENT = EXPERIMENT.replace("tokens: 640, batch_tokens: 64,", RECIPE)

UNTRAINED = """\
question: What does serving this checkpoint through less memory cost?
experiment: e.yaml
factors:
  weights:
    published: {training.init_from: checkpoint}
  serving:
    plain: {}
    tied: {serving.tie: "adjacent:2"}
    int8: {serving.kv_dtype: int8}
report: {sections: [serving-gap, starts]}
"""

UPTRAINED = """\
question: Does it help to start from full heads?
experiment: e.yaml
factors:
  heads:
    mha: {}
    mqa: {model.n_kv_head: 1, training.init_from: {heads: mha}}
"""


@pytest.fixture
def folder(tmp_path):
    with tiny_sweep_folder(tmp_path):
        yield tmp_path


def write_sweep(folder, sweep=UNTRAINED, tokens=0, **shape):
    """Write a sweep with its experiment, and beside it a checkpoint; return that."""
    (folder / "e.yaml").write_text(EXPERIMENT.replace("TOKENS", str(tokens)))
    (folder / "s.yaml").write_text(sweep)
    model = make_random_model(ModelConfig(**{**SHAPE, **shape}))
    if not find_missing("published_weights"):
        model.save_pretrained(folder / "checkpoint")
    return model


def plan_sweep(folder, store=None):
    return plan(load_sweep(folder / "s.yaml"), store)


def run_driver(folder, **options):
    """Run the trials alone."""
    store = Store(folder / "runs")
    planned = plan_sweep(folder, store)
    summary = drive(planned, store, partial(run_task, store=store.path), **options)
    return summary.exit_code, store, read_results(store, planned)


def read_results(store, planned):
    return {tuple(one.levels.values()): store.result(one.trial.id) for one in planned.trials}


@needs("published_weights")
def test_a_checkpoint_is_studied_without_training(folder):
    model, store = write_sweep(folder), Store(folder / "runs")
    assert main(["submit", "s.yaml", "--executor", "inline", "--store", str(store.path)]) == 0
    found = read_results(store, plan_sweep(folder, store))
    assert len({result["training"] for result in found.values()}) == 1
    weights = read_final_weights(store.training_directory(found["published", "plain"]["training"]))
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter)
    losses = {result["measurements"]["loss"] for result in found.values()}
    assert len(losses) == 1, "one-shot scoring cannot see serving"
    gaps = {key[1]: result["measurements"]["serving_gap"] for key, result in found.items()}
    assert abs(gaps["plain"]) < 1e-5
    assert abs(gaps["tied"]) > 1e-3
    assert found["published", "int8"]["measurements"]["kv_dtype_logit_rms"] > 0
    record = found["published", "plain"]["training_record"]
    assert (record["steps"], record["tokens"]) == (0, 0)
    assert record["start"]["source"] == "checkpoint"
    assert set(record["start"]["identity"]) == {"config.json", "model.safetensors"}
    assert sorted(record["start"]["copied"]) == sorted(weights)
    assert str(folder) not in str(found)
    page = (folder / "reports" / "s" / "report.md").read_text()
    assert "Starting weights" in page
    assert "The cache's dtype" in page


@pytest.fixture(scope="module")
def uptrained(tmp_path_factory):
    """A folder where the sweep from one training to another is done."""
    with tiny_sweep_folder(tmp_path_factory.mktemp("uptrained")) as folder:
        write_sweep(folder, UPTRAINED, 512)
        assert run_driver(folder)[0] == 0
    return folder


def test_a_cell_starts_from_the_training_of_another(uptrained):
    store = Store(uptrained / "runs")
    results = map(store.result, store.trial_ids())
    source, dependent = sorted(results, key=lambda r: r["training_record"]["start"] is not None)
    record = dependent["training_record"]["start"]
    assert record["source"] == "heads=mha, seed 0"
    assert record["identity"]["training"].startswith(source["training"])
    assert record["pooled"] == [
        f"blocks.{i}.attention.qkv.{p}" for i in (0, 1) for p in ("weight", "bias")
    ]
    assert source["training_record"]["start"] is None
    first = dependent["curves"]["train_loss"][0][2]
    assert first < source["curves"]["train_loss"][0][2] - 0.5, "it starts where the other ended"


@needs("published_weights")
def test_a_checkpoint_without_fitting_weights_fails_the_trial(folder):
    write_sweep(folder, n_embd=32)
    code, _, found = run_driver(folder)
    assert code == 1
    for result in found.values():
        assert result["error"]["class"] == "source"
        assert "none of its weights fits" in result["error"]["message"]


@needs("published_weights")
def test_a_checkpoint_that_changes_after_the_plan_is_refused(folder):
    write_sweep(folder)
    trial = plan_sweep(folder).trials[0].trial
    GPT(ModelConfig(**SHAPE), seed=6).save_pretrained(folder / "checkpoint")
    store = Store(folder / "runs")
    assert run_task(trial, store.path) == "failed"
    assert "its files are not those planned with" in store.result(trial.id)["error"]["message"]


@pytest.mark.parametrize("loss", ["flip", "collected"])
def test_a_lost_source_is_made_again_and_its_trial_stays(folder, uptrained, loss):
    """Its trial is done; one that starts from its weights comes later."""
    shutil.copytree(uptrained, folder, dirs_exist_ok=True)
    store = Store(folder / "runs")
    found = read_results(store, plan_sweep(folder, store))
    source, dependent = found["mha",], found["mqa",]
    result = store.trial_directory(source["trial"]) / "result.json"
    before = result.read_bytes()
    weights = store.training_directory(source["training"]) / "final" / "model.safetensors"
    data = weights.read_bytes()
    if loss == "collected":
        shutil.rmtree(weights.parent)
    else:
        weights.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    record = (weights.parent.parent / "training.json").read_bytes()
    shutil.rmtree(store.trial_directory(dependent["trial"]))
    shutil.rmtree(store.training_directory(dependent["training"]))

    events = []
    code, store, again = run_driver(folder, on_event=events.append)
    assert code == 0
    assert again["mqa",]["measurements"]["loss"] == dependent["measurements"]["loss"]
    assert again["mqa",]["curves"] == dependent["curves"]
    assert result.read_bytes() == before, "the numbers of the source stay"
    assert weights.read_bytes() == data
    assert (weights.parent.parent / "training.json").read_bytes() == record
    aside = store.training_directory(source["training"]) / "damaged" / "1"
    assert (aside / "final" / "model.safetensors").exists() == (loss != "collected")
    *_, said = [event.message for event in events if event.kind == "healed"]
    name = f"training {source['training']}"
    assert said.startswith(f"{name} has run again, since its weights were lost")
    assert said.endswith("they are the same, bit for bit")
    found = verify_record(store)
    assert (found.damaged, found.notes) == ([], [])
    assert not any("made again" in note for note in plan_sweep(folder, store).notes)


@needs("published_weights")
@pytest.mark.parametrize("loss", ["flip", "gone"])
def test_a_lost_record_of_the_start_lets_a_training_begin_anew(folder, loss):
    """It is written before the first step, so a training that goes on cannot write it."""
    write_sweep(folder, tokens=512)
    store, trial = Store(folder / "runs"), plan_sweep(folder).trials[0].trial
    directory = store.training_directory(trial.training_id)
    stop_at_fourth_step = iter([False, False, False, True])
    run = TorchTrainable(trial, lambda _: None)
    with store.training_lock(directory.name).hold() as fence, pytest.raises(Stopped):
        run.train(directory, lambda: next(stop_at_fourth_step), fence)
    start = directory / "start.json"
    whole = start.read_bytes()
    start.unlink()
    if loss == "flip":
        start.write_bytes(whole.replace(b"checkpoint", b"checkpaint"))
    code, store, results = run_driver(folder)
    assert code == 0
    assert start.read_bytes() == whole
    starts = [one["training_record"]["start"]["source"] for one in results.values()]
    assert starts == ["checkpoint"] * 3
    assert (directory / "damaged" / "1" / "checkpoints").exists()
    assert verify_record(store).damaged == []
