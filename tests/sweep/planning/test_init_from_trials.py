"""Trials with `init_from`: identities, the order of trainings, and sources that fail."""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from kvlab.errors import SpecError
from kvlab.model import GPT
from kvlab.spec import ModelConfig, load_sweep
from kvlab.store import Store
from kvlab.sweep import plan
from tests.support.extensions import needs
from tests.support.stub_trials import StubRun, drive, identify, tiny_plan, write_sweep

# The dependent level comes first, so that waiting is needed.
UPTRAINED = """\
question: Does it help to start from full heads?
experiment: e.yaml
factors:
  heads:
    mqa: {model.n_kv_head: 1, training.init_from: {heads: mha}}
    mha: {}
  serving:
    plain: {}
    tied: {serving.tie: "adjacent:2"}
seeds: [0, 1]
"""


def by_cell(planned):
    """Return the planned trials by (heads, serving, seed)."""
    return {(*one.levels.values(), one.trial.seed): one for one in planned.trials}


def test_the_source_is_the_same_cell_at_the_same_seed_but_for_what_is_named(tmp_path):
    trials = by_cell(tiny_plan(tmp_path, text=UPTRAINED))
    for serving in ("plain", "tied"):
        for seed in (0, 1):
            dependent, source = trials["mqa", serving, seed], trials["mha", "plain", seed]
            assert dependent.trial.source_training.training_id == source.trial.training_id
            assert dependent.starts_from == source.trial.id
    assert trials["mha", "plain", 0].starts_from is None
    changed = by_cell(tiny_plan(tmp_path, text=UPTRAINED.replace("{}", "{model.bias: false}", 1)))
    one, other = (of["mqa", "plain", 0].trial for of in (trials, changed))
    assert one.experiment == other.experiment
    assert one.training_id != other.training_id, "it starts from something else"


@pytest.mark.parametrize(("what", "state"), [("diverge", "diverged"), ("bug", "failed")])
def test_dependents_of_a_source_that_fails_are_recorded_with_the_reason(
    tmp_path, what, state, store
):
    planned = tiny_plan(tmp_path, text=UPTRAINED)
    trials = by_cell(planned)
    bad = [trials["mha", serving, 0].trial.id for serving in ("plain", "tied")]
    script = {(trial, "train", 3): what for trial in bad}
    summary = drive(planned, store, StubRun(store.path, script=script))
    assert summary.exit_code == 1
    assert not summary.states["missing"]
    for serving in ("plain", "tied"):
        result = store.result(trials["mqa", serving, 0].trial.id)
        assert (result["status"], result["error"]["class"]) == ("failed", "source")
        assert "(heads=mha, seed 0)" in result["error"]["message"]
        assert ("diverged" in result["error"]["message"]) == (what == "diverge")
        assert store.status(trials["mha", serving, 0].trial.id) == state
        assert store.status(trials["mqa", serving, 1].trial.id) == "done"
    if what == "bug":  # run again: the source, and then what waited for it
        again = tiny_plan(tmp_path, store, UPTRAINED)
        summary = drive(again, store, StubRun(store.path), retry_failed=True)
        assert (summary.exit_code, summary.states["done"], summary.trials_run) == (0, 8, 4)


def test_a_trained_dependent_needs_its_source_no_more(tmp_path, store):
    planned = tiny_plan(tmp_path, text=UPTRAINED)
    drive(planned, store, StubRun(store.path))
    trials = by_cell(planned)
    shutil.rmtree(store.training_directory(trials["mha", "plain", 0].trial.training_id))
    gone = trials["mqa", "tied", 0].trial.id
    (store.trial_directory(gone) / "result.json").unlink()
    again = drive(tiny_plan(tmp_path, store, UPTRAINED), store, StubRun(store.path))
    assert (again.exit_code, again.states["done"], again.trials_run) == (0, 8, 1)


CHECKPOINT = UPTRAINED.replace("{heads: mha}", "./weights")


def write_checkpoint(folder, seed=0):
    shape = ModelConfig(vocab_size=257, block_size=8, n_layer=2, n_head=2, n_embd=8)
    GPT(shape, seed).save_pretrained(folder / "weights")


def checkpoint_plan(folder):
    return by_cell(plan(load_sweep(write_sweep(folder, CHECKPOINT)), identify=identify))


@needs("published_weights")
def test_a_checkpoints_bytes_are_its_identity_wherever_it_lies(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        write_checkpoint(folder)
    key = ("mqa", "plain", 0)
    first, moved = (checkpoint_plan(folder)[key].trial for folder in (one, two))
    assert first.id == moved.id
    file = two / "weights" / "model.safetensors"
    tensors = load_file(file)
    tensors["transformer.wte.weight"][0, 0] += 1e-3
    save_file(tensors, file, metadata={"format": "pt"})
    assert checkpoint_plan(two)[key].trial.training_id != first.training_id
    assert first.source_training is None


@needs("published_weights")
def test_a_checkpoint_that_is_not_there_is_refused_at_its_place(tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / "weights" / "model.safetensors").unlink()
    for reason in ("safetensors are read", "folder"):
        with pytest.raises(SpecError) as caught:
            checkpoint_plan(tmp_path)
        assert "s.yaml:5:51: training.init_from = weights" in str(caught.value)
        assert reason in str(caught.value)
        shutil.rmtree(tmp_path / "weights", ignore_errors=True)


CHAIN = """\
question: Does a chain of starts end?
experiment: e.yaml
factors:
  size:
    third: {training.init_from: {size: second}, resources.microbatch_tokens: 8, model.bias: false}
    second: {training.init_from: {size: first}, model.n_kv_head: 1}
    first: {}
"""


def test_a_chain_runs_in_order_and_fails_as_a_whole(tmp_path, store):
    planned = tiny_plan(tmp_path, text=CHAIN)
    events = []
    drive(planned, store, StubRun(store.path), on_event=events.append)
    started = [e.planned.levels["size"] for e in events if e.kind == "started"]
    assert started == ["first", "second", "third"]
    first = next(one.trial.id for one in planned.trials if one.levels["size"] == "first")
    broken = Store(tmp_path / "broken")
    run = StubRun(broken.path, script={(first, "train", 0): "bug"})
    summary = drive(planned, broken, run)
    assert summary.states == {"failed": 3, "missing": 0}
    kinds = [broken.result(one.trial.id)["error"]["class"] for one in planned.trials]
    assert sorted(kinds) == ["bug", "source", "source"]
