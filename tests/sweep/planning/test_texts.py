"""What the text must hold is known before the first trial; the same text is the same trial."""

import os
import re
from functools import partial
from types import SimpleNamespace

import pytest

from kvlab.data.dataset_preparation import prepare_dataset
from kvlab.data.requirements import find_shortages, scale_defaults
from kvlab.data.shards import DatasetFacts
from kvlab.errors import DataError
from kvlab.evaluate import evaluate
from kvlab.model import GPT
from kvlab.spec import load_experiment, load_sweep
from kvlab.store import Store
from kvlab.sweep import plan
from kvlab.sweep.planning.planner import describe_sweep
from tests.support.tiny_sweep import EXPERIMENT, SWEEP, run_kvlab, tiny_sweep_folder

BLOCK = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with tiny_sweep_folder(tmp_path_factory.mktemp("texts")) as folder:
        prepare_dataset(load_experiment("e.yaml").data)
        yield folder


@pytest.fixture
def held(folder):
    """The number of held-out tokens."""
    write(folder)
    return len(prepare_dataset(load_experiment(folder / "e.yaml").data).validation)


def write(folder, old="", new="", sweep=SWEEP):
    assert old in EXPERIMENT
    (folder / "e.yaml").write_text(EXPERIMENT.replace(old, new) if old else EXPERIMENT)
    (folder / "s.yaml").write_text(sweep)


def write_defaults(folder):
    text = EXPERIMENT.replace(", evaluate_tokens: 64", "").replace("{loss_tokens: 64}", "{}")
    (folder / "e.yaml").write_text(text)
    (folder / "s.yaml").write_text(SWEEP)


@pytest.mark.parametrize(
    ("command", "old", "new", "place"),
    [
        ("plan", "evaluate_tokens: 64", "evaluate_tokens: 1e6", "4:79: training.evaluate_tokens = "),
        ("submit", "loss_tokens: 64", "loss_bytes: 99999", "5:26: evaluation.loss_bytes = "),
    ],
)  # fmt: skip
def test_a_request_for_more_text_than_there_is_is_refused_at_its_key(
    folder, held, old, new, place, command
):
    write(folder, old, new)
    code, out, error = run_kvlab(command, "s.yaml")
    assert (code, out) == (2, "")
    line = next(line for line in error.splitlines() if place in line)
    assert line.startswith(f"e.yaml:{place}")
    count = int(float(new.split()[-1]))
    windows = -(-count // BLOCK) * BLOCK + 1
    assert "bytes" in new or f"needs {windows:,} held-out tokens, and the text has {held:,}" in line
    assert line.endswith("or less, raise data.validation_fraction or give more text")
    assert not (folder / "runs" / "trials").exists(), "something has begun"


def test_a_default_is_lowered_to_a_small_text_with_one_note(folder, held):
    largest = (held - 1) // BLOCK * BLOCK
    write_defaults(folder)
    planned = plan(load_sweep(folder / "s.yaml"))
    for one in planned.trials:
        assert one.trial.experiment.training.evaluate_tokens == largest
        assert one.trial.experiment.evaluation.loss_tokens == largest
    counts = f"training.evaluate_tokens = {largest:,} and evaluation.loss_tokens = {largest:,}"
    note = f"the text has {held:,} held-out tokens, so {counts}, less than by default"
    assert planned.notes == (note,)
    assert f"Note: {note}." in run_kvlab("plan", "s.yaml")[1]


def ids(folder):
    return [one.trial.id for one in plan(load_sweep(folder / "s.yaml")).trials]


def test_equal_tokens_are_equal_trials(tmp_path):
    with tiny_sweep_folder(tmp_path) as folder:
        texts, first = folder / "texts", ids(folder)
        (texts / "empty.txt").touch()
        (texts / "notes.md").write_text("not read")
        os.rename(texts / "00.txt", texts / "zz.txt")
        os.utime(texts / "01.txt", (1e9, 1e9))
        assert "is not prepared" not in run_kvlab("plan", "s.yaml")[1]
        assert ids(folder) == first
        # what only a preparation shows to be the same: blank text, a copy, a limit beyond the text
        (texts / "blank.txt").write_text(" \n\n")
        (texts / "copy.txt").write_text((texts / "05.txt").read_text())
        write(folder, "paths: [texts]", "paths: [texts], max_bytes: 1e9")
        assert ids(folder) == first
        (texts / "new.txt").write_text("a text of its own " * 20)
        assert not set(ids(folder)) & set(first)


def test_the_record_of_a_sweep_knows_its_texts(folder, tmp_path):
    write_defaults(folder)
    planned = plan(load_sweep(folder / "s.yaml"))
    store = Store(tmp_path)
    store.write_sweep(describe_sweep(planned, yaml="", experiment_yaml="", command=""))
    sweep, nothing = load_sweep(folder / "s.yaml"), {"identify": lambda _: None}
    again = plan(sweep, store, provisional=True, **nothing)
    assert [one.trial.id for one in again.trials] == [one.trial.id for one in planned.trials]
    assert (again.absent, again.notes) == ((), planned.notes)
    unknown = plan(sweep, provisional=True, **nothing)
    assert len(unknown.absent) == 1
    assert unknown.trials[0].trial.id != planned.trials[0].trial.id


def test_a_file_that_is_wrong_further_on_is_refused_where_it_is_named(tmp_path):
    with tiny_sweep_folder(tmp_path) as folder:
        (folder / "texts" / "01.txt").write_bytes(b"a text " * 20_000 + b"caf\xe9")
        for command in ("plan", "submit"):
            code, _, error = run_kvlab(command, "s.yaml")
            assert code == 2
            assert error.startswith("e.yaml:")
            assert error.endswith("01.txt is not UTF-8 at byte 140003; convert it\n")


@pytest.mark.parametrize(
    "changes",
    [{"evaluation.served_tokens": 100}, {"evaluation.positions": True, "model.position": "rope"}],
)
def test_the_check_refuses_exactly_what_the_evaluation_does(folder, changes):
    write(folder)
    text = prepare_dataset(load_experiment(folder / "e.yaml").data)
    model = None
    for there, count in [(97, 96), (96, 96), (101, 96), (113, 97), (112, 97), (129, 100)]:
        patch = {"evaluation.loss_tokens": count, "training.tokens": 0, **changes}
        experiment = load_experiment(folder / "e.yaml", patch)
        model = model or GPT(experiment.model, seed=0)
        short = SimpleNamespace(validation=text.validation[:there])
        is_short = bool(list(find_shortages(experiment, DatasetFacts("d", 10**9, there, there))))
        assert is_short == is_refused(partial(evaluate, model, short, experiment)), (there, count)


def is_refused(ask):
    try:
        ask()
    except DataError:
        return True
    return False


@pytest.mark.parametrize("held_out", [17, 33, 65_536, 65_537])
@pytest.mark.parametrize("positions", [False, True])
def test_lowered_defaults_always_fit(folder, held_out, positions):
    write_defaults(folder)
    patch = {"evaluation.positions": positions, "model.position": "rope"}
    experiment = load_experiment(folder / "e.yaml", patch)
    facts = DatasetFacts("d", 10**9, held_out, held_out)
    scaled, note = scale_defaults(experiment, facts)
    unfit = [key for key, _ in find_shortages(scaled, facts)]
    assert (unfit == []) == (held_out > 32 or not positions), unfit
    assert (note is None) == (held_out > 65_536)
    assert scale_defaults(scaled, facts) == (scaled, None)


@pytest.mark.parametrize(
    "key", ["training.evaluate_tokens", "evaluation.loss_tokens", "evaluation.served_tokens",
            "evaluation.loss_bytes", "evaluation.positions"],
)  # fmt: skip
@pytest.mark.parametrize("held_out", [0, 16, 17, 64])
def test_what_a_shortage_offers_is_enough_and_the_most(folder, key, held_out):
    write_defaults(folder)
    facts = DatasetFacts("d", 10**9, held_out, held_out)

    def find(value):
        of = load_experiment(folder / "e.yaml", {key: value, "model.position": "rope"})
        return dict(find_shortages(of, facts)).get(key)

    offered = re.search(r"; use ([0-9,]+) or less, ", find(key.endswith("positions") or 1000))
    has_window = held_out > (BLOCK if "tokens" in key else 0)
    assert (offered is not None) == (has_window and not key.endswith("positions"))
    if offered is not None:
        most = int(offered[1].replace(",", ""))
        assert find(most) is None
        assert find(most + 1) is not None
