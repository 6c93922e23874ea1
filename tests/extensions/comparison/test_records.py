"""Two records of one trial; `answers.txt` and `errors.txt` have what the command prints."""

import json

import pytest

from kvlab.cli.main import main
from kvlab.extensions.comparison.records import TOLERANCES, find_tolerance
from kvlab.store import Store
from kvlab.store.metrics import METRICS
from tests.support.record_factory import TIED_GAP, Record

SMALL = {"heads": ("mha", "mqa"), "sharing": ("none", "tied")}
UNTIED, TIED = {"heads": "mqa", "sharing": "none"}, {"heads": "mqa", "sharing": "tied"}
LOSS = TOLERANCES["nats/token"]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def compare(tmp_path, capsys):
    """Compare a trial with its record on another machine; give the code and the last line.

    What is measured there is off by what is set.
    """
    record = Record(factors=SMALL, seeds=(0,))
    record.write(tmp_path / "runs")

    def run(*words, levels=UNTIED, **off):
        def change(found, _levels, _seed):
            found["measurements"]["tpot_ms_p50"] = 9.0
            for name, value in off.items():
                found["measurements"][name] = found["measurements"].get(name, 0) + value

        trial, there = record.trial(levels, 0), Record(factors=SMALL, seeds=(0,), change=change)
        there.write_result(Store(tmp_path / "other"), levels, 0, "done")
        code = main(["compare", "--trials", *(words or (f"runs:{trial}", f"other:{trial}"))])
        out, err = capsys.readouterr()
        return code, (out or err).splitlines()[-1] if "--json" not in words else out

    run.trial = record.trial(UNTIED, 0)
    return run


@pytest.mark.parametrize(
    ("levels", "off", "agrees"),
    [
        (UNTIED, {"loss_served": 0.9 * LOSS}, True),
        (UNTIED, {"loss_served": 1.1 * LOSS}, False),
        (UNTIED, {"kv_bytes_storage": 1}, False),
        (UNTIED, {"loss_unigram": 5.0}, False),
        # a tied cache changes what is computed, by 1.5 nats/token, which multiplies what parts
        (TIED, {"loss_served": 0.0027}, True),
        (TIED, {"loss_served": 1.01 * LOSS + 0.01 * TIED_GAP}, False),
        (TIED, {"loss": 0.0027}, False),
        (UNTIED, {"loss_served": 0.0027}, False),
    ],
)
def test_records_agree_within_the_tolerance_of_what_a_cell_is(compare, levels, off, agrees):
    code, verdict = compare(levels=levels, **off)
    assert code == (not agrees)
    state = "agree" if agrees else f"DISAGREE in {next(iter(off))}"
    assert verdict.startswith(f"verdict: one trial, and the records {state}: ")
    assert verdict.endswith(f"1 within the tolerance, {'none' if agrees else '1'} beyond it") == (
        agrees
    )


def test_what_one_machine_alone_measures_is_not_compared(compare):
    code, verdict = compare(training_mfu=0.3)
    assert (code, verdict.startswith("verdict: one trial, and the records agree: ")) == (0, True)
    code, verdict = compare(loss_paired=4.0)
    assert code == 1
    assert "DISAGREE in loss_paired: " in verdict


def test_folders_and_ids(compare):
    assert (
        compare(compare.trial[:5], compare.trial[:5], "--store", "runs", "--store-b", "other")[0]
        == 0
    )
    folders = [f"runs/trials/{compare.trial}", f"other/trials/{compare.trial}"]
    code, out = compare(*folders, "--json")
    facts = json.loads(out)
    assert (code, facts["agrees"], facts["exact"]) == (0, True, [])
    (tpot,) = (one for one in facts["metrics"] if one["name"] == "tpot_ms_p50")
    assert (tpot["after"], tpot["verdict"]) == (9.0, "not compared")


def test_a_damaged_record_is_not_compared(compare, capsys):
    assert compare()[0] == 0
    path = Store("other").trial_directory(compare.trial) / "result.json"
    path.write_bytes(path.read_bytes()[:-9])
    assert main(["compare", "--trials", f"runs:{compare.trial}", f"other:{compare.trial}"]) == 1
    assert "is damaged" in capsys.readouterr().err


def test_every_metric_has_a_tolerance_or_none():
    exact = {name for name in METRICS if find_tolerance(name, 1.0) == 0.0}
    assert {"kv_bytes_formula", "loss_tokens"} <= exact
    assert find_tolerance("training_mfu", 1.0) is None, "a share, of the machine"
