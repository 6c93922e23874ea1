"""What is made ready before the first trial."""

import pytest

from kvlab.data import list_prepared_datasets
from kvlab.errors import DataError, Stopped
from kvlab.spec import load_sweep
from kvlab.sweep import plan
from kvlab.sweep.driver.preparation import prefetch_data
from tests.support.tiny_sweep import SWEEP, write_tiny_sweep


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    return tmp_path


def nothing(*_):
    pass


def test_every_distinct_text_is_prepared_once(folder):
    text = SWEEP + "  text:\n    all: {}\n    less: {data.max_bytes: 15e3}\nseeds: [0, 1]\n"
    planned = plan(load_sweep(write_tiny_sweep(folder, text)))
    assert len(planned.trials) == 8
    said = []
    prefetch_data(planned.trials, said.append, nothing)
    found = {one.trial.data_identity[:16] for one in planned.trials}
    assert sorted(path.name for path in list_prepared_datasets()) == sorted(found)
    assert len(found) == 2
    assert said
    said.clear()
    prefetch_data(planned.trials, said.append, nothing)
    assert said == []


def test_hellaswag_is_had_before_anything_is_trained(folder):
    (folder / "data").mkdir()
    (folder / "data" / "hellaswag_val.jsonl").write_text("not the set")
    path = write_tiny_sweep(folder)
    prefetch_data(plan(load_sweep(path)).trials, nothing, nothing)
    experiment = folder / "e.yaml"
    experiment.write_text(experiment.read_text().replace("loss_tokens: 64", "hellaswag: 5"))
    with pytest.raises(DataError, match="is not HellaSwag"):
        prefetch_data(plan(load_sweep(path)).trials, nothing, nothing)


def test_it_ends_when_asked_and_goes_on_the_next_time(folder):
    planned = plan(load_sweep(write_tiny_sweep(folder)))
    said = []

    def stop():
        if said:
            raise Stopped("asked to stop")

    with pytest.raises(Stopped):
        prefetch_data(planned.trials, said.append, stop)
    assert list_prepared_datasets() == [] or said[-1].endswith(str(list_prepared_datasets()[0]))
    prefetch_data(planned.trials, nothing, nothing)
    assert len(list_prepared_datasets()) == 1
