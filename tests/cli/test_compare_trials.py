"""`kvlab compare --trials`: two records of one trial; `golden_errors/answers.txt` has the text."""

import json

import pytest

from kvlab.cli.main import main
from kvlab.store import Store
from kvlab.store.metrics import METRICS, TOLERANCES, find_tolerance
from tests.support.record_factory import TIED_GAP, Record

FACTORS = {"heads": ("mha", "mqa"), "sharing": ("none", "tied")}
UNTIED, TIED = {"heads": "mqa", "sharing": "none"}, {"heads": "mqa", "sharing": "tied"}
LOSS = TOLERANCES["nats/token"]


class Elsewhere(Record):
    """The same trials on another machine, where what is measured is off by what is set."""

    off: dict = {}  # noqa: RUF012

    def measurements(self, levels, seed):
        found = super().measurements(levels, seed) | {"tpot_ms_p50": 9.0}
        return found | {name: found.get(name, 0) + change for name, change in self.off.items()}


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """Compare a trial with its record on another machine; give the code and the last line."""
    monkeypatch.chdir(tmp_path)
    record, there = (kind(factors=FACTORS, seeds=(0,)) for kind in (Record, Elsewhere))
    record.write(tmp_path / "runs")

    def run(*words, levels=UNTIED, **off):
        there.off, trial = off, record.trial(levels, 0)
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


def test_what_cannot_be_compared(compare, capsys):
    code, err = compare(compare.trial, compare.trial, "--store", "runs")
    assert (code, "A and B are one record" in err) == (2, True)
    code, err = compare(f"runs:{compare.trial}", "nowhere:1234")
    assert (code, "trial = 1234 is not in nowhere" in err) == (2, True)
    path = Store("other").trial_directory(compare.trial) / "result.json"
    path.write_bytes(path.read_bytes()[:-9])
    assert main(["compare", "--trials", f"runs:{compare.trial}", f"other:{compare.trial}"]) == 1
    assert "is damaged" in capsys.readouterr().err


def test_every_metric_has_a_tolerance_or_none():
    exact = {name for name in METRICS if find_tolerance(name, 1.0) == 0.0}
    assert {"kv_bytes_formula", "loss_tokens", "needle_rows"} <= exact
    assert find_tolerance("training_mfu", 1.0) is None, "a share, of the machine"
    assert find_tolerance("lm_eval_prose_word_perplexity", 20.0) == pytest.approx(0.2)
