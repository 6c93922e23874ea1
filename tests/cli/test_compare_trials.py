"""`kvlab compare --trials`: two records of one trial, and of two."""

import json

import pytest

from kvlab.cli.main import main
from kvlab.store import Store
from kvlab.store.metrics import METRICS, TOLERANCES, find_tolerance
from tests.support.record_factory import TIED_GAP, Record

LEVELS = {"heads": "mqa", "sharing": "none"}
TIED = {"heads": "mqa", "sharing": "tied"}


class Elsewhere(Record):
    """The same trials on another machine, whose losses and bytes are off by what is set."""

    loss_change, byte_change, platform, extra = 0.0, 0, "Linux-6", {}

    def measurements(self, levels, seed):
        found = super().measurements(levels, seed)
        found["loss_served"] += self.loss_change
        found["kv_bytes_storage"] += self.byte_change
        return found | {"tpot_ms_p50": 9.0} | self.extra

    def result(self, levels, seed, status):
        found = super().result(levels, seed, status)
        found["provenance"] |= {"platform": self.platform, "threads": 8}
        return found


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    facts = {"factors": {"heads": ("mha", "mqa"), "sharing": ("none", "tied")}, "seeds": (0, 1)}
    record = Record(**facts)
    record.write(tmp_path / "runs")
    trial = record.trial(LEVELS, 0)

    def run(*, words=None, levels=LEVELS, **changes):
        there, trial = Elsewhere(**facts), record.trial(levels, 0)
        for name, value in changes.items():
            setattr(there, name, value)
        there.write_result(Store(tmp_path / "other"), levels, 0, "done")
        chosen = words or [f"runs:{trial[:6]}", f"other:{trial[:6]}"]
        code = main(["compare", "--trials", *chosen])
        out, err = capsys.readouterr()
        return code, out or err

    run.trial, run.record = trial, record
    return run


def test_losses_within_the_tolerance_agree(compare):
    code, out = compare(loss_change=0.9 * TOLERANCES["nats/token"])
    assert code == 0
    assert "configuration: no field differs" in out
    assert "threads                 1             8" in out
    assert "platform                not recorded  Linux-6" in out
    assert "within" in out
    assert "of the machine, not compared" in out
    last = out.splitlines()[-1]
    assert last.startswith("verdict: one trial, and the records agree: ")
    assert "1 within the tolerance, none beyond it" in last


def test_a_tied_cell_that_was_made_on_another_processor_agrees(compare):
    """Its cache changes what is computed, by 1.5 nats/token, which multiplies what parts."""
    change = 0.0027
    assert TOLERANCES["nats/token"] < change < TOLERANCES["nats/token"] + 0.01 * TIED_GAP
    assert compare(loss_change=change, levels=TIED)[0] == 0
    assert compare(loss_change=change)[0] == 1
    assert compare(loss_change=0.0021 + 0.01 * TIED_GAP, levels=TIED)[0] == 1
    assert compare(extra={"loss": compare.record.loss(TIED, 0) + change}, levels=TIED)[0] == 1


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"loss_change": 1.1 * TOLERANCES["nats/token"]}, "loss_served"),
        ({"byte_change": 1}, "kv_bytes_storage"),
        ({"extra": {"loss_unigram": 5.0}}, "loss_unigram"),
    ],
)
def test_what_is_beyond_it_is_named(compare, changes, name):
    code, out = compare(**changes)
    assert code == 1
    assert out.splitlines()[-1].startswith(
        f"verdict: one trial, and the records DISAGREE in {name}:"
    )


def test_folders_and_ids(compare):
    other = ["--store", "runs", "--store-b", "other"]
    assert compare(words=[compare.trial[:5], compare.trial[:5], *other])[0] == 0
    folders = [f"runs/trials/{compare.trial}", f"other/trials/{compare.trial}"]
    assert compare(words=folders)[0] == 0
    code, out = compare(words=[*folders, "--json"])
    facts = json.loads(out)
    assert (code, facts["agrees"], facts["exact"]) == (0, True, [])
    (tpot,) = (one for one in facts["metrics"] if one["name"] == "tpot_ms_p50")
    assert (tpot["after"], tpot["verdict"]) == (9.0, "not compared")


def test_two_trials_are_told_apart_by_their_configuration(compare):
    baseline = compare.record.trial({"heads": "mha", "sharing": "none"}, 1)
    code, out = compare(words=[f"runs:{baseline}", f"other:{compare.trial}"])
    assert code == 1
    assert out.splitlines()[-1] == "verdict: two trials, which differ in seed, model.n_kv_head"


def test_what_cannot_be_compared(compare, capsys):
    code, err = compare(words=[compare.trial, compare.trial, "--store", "runs"])
    assert code == 2
    assert "A and B are one record" in err
    code, err = compare(words=[f"runs:{compare.trial}", "nowhere:1234"])
    assert code == 2
    assert "trial = 1234 is not in nowhere" in err
    path = Store("other").trial_directory(compare.trial) / "result.json"
    path.write_bytes(path.read_bytes()[:-9])
    assert main(["compare", "--trials", f"runs:{compare.trial}", f"other:{compare.trial}"]) == 1
    assert "is damaged" in capsys.readouterr().err


def test_every_metric_has_a_tolerance_or_none():
    exact = {name for name in METRICS if find_tolerance(name, 1.0) == 0.0}
    assert {"kv_bytes_formula", "loss_tokens", "needle_rows"} <= exact
    assert find_tolerance("training_mfu", 1.0) is None, "a share, of the machine"
    assert find_tolerance("lm_eval_prose_word_perplexity", 20.0) == pytest.approx(0.2)
