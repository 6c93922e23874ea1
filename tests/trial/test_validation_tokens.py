"""Too little held-out text is found before a training, not at its end."""

from functools import partial
from types import SimpleNamespace

import pytest

from kvlab.data import prepare_dataset
from kvlab.errors import DataError
from kvlab.evaluate import evaluate
from kvlab.model import GPT
from kvlab.spec import load_experiment, load_sweep
from kvlab.store import Store
from kvlab.sweep import plan
from kvlab.trial.run import run_trial
from kvlab.trial.stages import check_validation_tokens
from tests.support.tiny_sweep import EXPERIMENT, tiny_sweep_folder


@pytest.fixture
def sweep_folder(tmp_path):
    with tiny_sweep_folder(tmp_path) as folder:
        yield folder


@pytest.mark.parametrize(
    "patch",
    [
        {"evaluation": "{loss_tokens: 1e6}"},
        {"evaluation": "{loss_tokens: 64, served_tokens: 1e6}"},
        {"training": "{tokens: 640, batch_tokens: 64, evaluate_tokens: 1e6}"},
    ],
)
def test_a_trial_that_asks_for_too_much_fails_before_it_trains(sweep_folder, patch):
    base_lines = [line for line in EXPERIMENT.splitlines() if line.partition(":")[0] not in patch]
    lines = [f"{section}: {value}" for section, value in patch.items()]
    (sweep_folder / "e.yaml").write_text("\n".join([*base_lines, *lines]))
    trial = plan(load_sweep(sweep_folder / "s.yaml")).trials[0].trial
    store = Store(sweep_folder / "runs")
    assert run_trial(trial, store.path) == "failed"
    error = store.result(trial.id)["error"]
    assert (error["class"], error["type"]) == ("data", "DataError")
    assert "held-out tokens, too few for 1,000,000 and their next" in error["message"]
    assert "raise data.validation_fraction" in error["message"]
    assert not store.training_directory(trial.training_id).exists(), "it had begun"


def experiment(sweep_folder, count, **changes):
    text = EXPERIMENT.replace("evaluation: {", "evaluation: {hellaswag: none, ")
    (sweep_folder / "e.yaml").write_text(text)
    patch = {"evaluation.loss_tokens": count, "training.tokens": 0}
    return load_experiment(sweep_folder / "e.yaml", {**patch, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"evaluation.served": False},
        {"evaluation.served_tokens": 100},
        {"evaluation.positions": True},
        {"evaluation.positions": True, "model.position": "rope"},
    ],
)
def test_the_check_refuses_exactly_what_the_evaluation_does(sweep_folder, changes):
    text = prepare_dataset(experiment(sweep_folder, 64).data)
    model = None
    for there, count in [(97, 96), (96, 96), (101, 96), (113, 97), (112, 97), (129, 100)]:
        of = experiment(sweep_folder, count, **changes)
        model = model or GPT(of.model, seed=0)
        short = SimpleNamespace(validation=text.validation[:there])
        calls = (
            partial(check_validation_tokens, short.validation, of),
            partial(evaluate, model, short, of),
        )
        assert len({is_refused(ask) for ask in calls}) == 1, (there, count)


def is_refused(ask):
    try:
        ask()
    except DataError:
        return True
    return False
