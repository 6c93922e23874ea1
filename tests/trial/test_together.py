"""A trial whose training runs in two workers under Ray Train, on a real local cluster."""

import json
import random
from functools import partial

import pytest

from kvlab.data import identity
from kvlab.errors import Diverged, ResourceError
from kvlab.spec import Experiment
from kvlab.sweep.executors import EXECUTORS
from kvlab.trial import Store
from kvlab.trial.run import run_trial
from kvlab.trial.together import train_together
from kvlab.trial.trial import Trial
from tests.contracts.executor_contract import until_ended


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "rhymes.jsonl"
    rng, words = random.Random(1), ["cat", "sat", "mat", "hat", "flat", "at", "the", "on"]
    lines = [" ".join(rng.choices(words, k=30)) for _ in range(400)]
    path.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    return path


@pytest.fixture
def trial(text, tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))

    def of(workers, **training):
        experiment = Experiment(
            name="two",
            model={"vocab_size": 257, "block_size": 32, "n_layer": 1, "n_head": 2, "n_embd": 16},
            data={"source": "files", "paths": [str(text)], "tokenizer": "bytes",
                  "validation_fraction": 0.5},
            training={"tokens": 128 * 50, "batch_tokens": 128, "learning_rate": 1e-2,
                      "evaluate_every": 25, "evaluate_tokens": 256, **training},
            evaluation={"loss_tokens": 256, "served": False},
            benchmark={"prompt_tokens": 4, "new_tokens": 4, "repeats": 1},
            resources={"cpus": 1, "workers": workers, "microbatch_tokens": 32},
        )  # fmt: skip
        return Trial.of(experiment, identity(experiment.data), seed=3)

    return of


def test_two_workers_under_ray_lose_as_one_does(trial, tmp_path):
    alone, together = trial(1), trial(2)
    assert alone.id == together.id, "workers are where a trial runs, not what it computes"
    assert run_trial(alone, tmp_path / "one") == "done"
    wild = trial(2, learning_rate=1e35, clip=1e30)
    executor = EXECUTORS["ray"](partial(run_trial, store=str(tmp_path / "two")), None)
    try:
        for one, wanted in ((together, "done"), (wild, "diverged")):
            executor.start(one)
            ended = until_ended(executor)[one.id]
            assert (ended.outcome, ended.error) == (wanted, None)
    finally:
        executor.close()
    one, two = (Store(tmp_path / name).result(alone.id) for name in ("one", "two"))
    assert two["training_record"]["workers"] == 2
    for name in ("train_loss", "validation_loss"):
        assert len(one["curves"][name]) >= 2
        for a, b in zip(one["curves"][name], two["curves"][name], strict=True):
            assert a == pytest.approx(b, abs=1e-5)
    assert two["measurements"]["loss"] == pytest.approx(one["measurements"]["loss"], abs=1e-5)
    folder = Store(tmp_path / "two").training_directory(alone.training_id)
    assert not (folder / "together").exists()
    error = Store(tmp_path / "two").result(wild.id)["error"]
    assert error["type"] == Diverged.__name__


def test_without_ray_it_is_refused(trial, tmp_path):
    with pytest.raises(ResourceError, match=r"2 workers train together under Ray.*--executor ray"):
        train_together(trial(2), tmp_path, lambda _: None, lambda: False)
