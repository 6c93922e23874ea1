"""What a plan says of its precision: from the design, and with the spread that records show."""

import numpy as np
import pytest

from kvlab.errors import RecordDamaged
from kvlab.extensions.expected_precision.outlook import expect_precision
from kvlab.fs.sealed_files import read_sealed_json, write_sealed_json
from kvlab.spec import load_sweep
from kvlab.store import Store
from kvlab.sweep.planning.planner import SweepPlanner
from kvlab.sweep.planning.stages import plan_at_least, plan_stage
from tests.support.extensions import needs
from tests.support.stub_looks import drive_looks
from tests.support.stub_trials import SWEEP, identify, tiny_plan, write_sweep

DECIDE = "decide: {metric: loss, margin: 0.05}\n"


def expect(folder, store, text=SWEEP + DECIDE, name="s.yaml"):
    planner = SweepPlanner(load_sweep(write_sweep(folder, text, name)), store, identify)
    stage = plan_stage(planner.sweep, store, identify=identify)
    return expect_precision(stage, plan_at_least(stage, planner), store, folder / "reports")


def say(expected):
    return "\n".join(expected.describe())


def test_without_a_record_only_the_design_speaks(tmp_path):
    expected = expect(tmp_path, Store(tmp_path / "none"))
    assert expected.spread is None
    assert list(expected.design.half_widths()) == ["heads=mqa"], "ties share trainings"
    widest = expected.design.half_widths()["heads=mqa"]
    assert f"spread must be below {0.05 / widest:.2g} nats/token" in say(expected)
    assert expect(tmp_path, Store(tmp_path / "none"), SWEEP).margin is None


def test_the_spread_of_the_own_record_is_used_and_trainings_count_once(tmp_path, planned, driven):
    losses = [
        [driven.result(trial)["measurements"]["loss"] for trial in cell.trials.values()]
        for cell in planned.cells
        if cell.levels["serving"] == "plain"
    ]
    text = (SWEEP + DECIDE).replace("seeds: [0, 1]", "seeds: 4")
    expected = expect(tmp_path, driven, text)
    pooled = np.mean([np.var(own, ddof=1) for own in losses]) ** 0.5
    assert expected.spread.value == pytest.approx(pooled)
    assert (expected.spread.sweep, expected.spread.trainings) == ("s", 4)
    reach = expected.design.half_widths()["heads=mqa"] * pooled
    assert reach > 0.05, "stubs have losses at random"
    assert f"about {reach:.2g} nats/token, more than the margin of 0.05" in say(expected)
    assert '"costs less than 0.05" is unlikely to be shown' in say(expected)
    wide = expect(tmp_path, driven, text.replace("0.05", f"{2 * reach}"))
    assert "within the margin" in say(wide)
    assert wide.to_json()["seeds_within_margin"] <= 4
    assert expect(tmp_path, driven) is None, "a sweep that is done needs no word"


def test_the_spread_of_another_sweep_is_used_if_its_models_are_of_the_size(tmp_path, driven):
    text = (SWEEP + DECIDE).replace("[0, 1]", "[7, 8, 9]")
    other = expect(tmp_path, driven, text, "other.yaml")
    assert other.spread.sweep == "s"
    assert "trainings of s: " in say(other)
    for change in ("{model.n_layer: 6}", "{training.tokens: 640}"):
        larger = text.replace("mha: {}", f"mha: {change}").replace(
            "{model.n_kv_head: 1}", f"{change[:-1]}, model.n_kv_head: 1}}"
        )
        assert expect(tmp_path, driven, larger, "larger.yaml").spread is None, change


def test_a_result_of_the_own_record_that_lacks_its_model_is_refused(tmp_path, planned, driven):
    trial = planned.trials[0].trial.id
    path = driven.trial_directory(trial) / "result.json"
    result = read_sealed_json(path)
    del result["experiment"]["model"]
    result["measurements"]["kv_bytes_read"], result["benchmark"] = 1.0, [{"metric": "kv_read"}]
    write_sealed_json(path, result)
    with pytest.raises(RecordDamaged, match=f"the record of {trial} "):
        expect(tmp_path, driven, (SWEEP + DECIDE).replace("seeds: [0, 1]", "seeds: 4"))


def test_a_report_tells_the_spread_where_the_store_has_none(tmp_path):
    """Trainings count once: a cell that is served otherwise has the losses of serving, too."""
    path = tmp_path / "reports" / "old" / "results.csv"
    path.parent.mkdir(parents=True)
    rows = ["factor.heads,factor.serving,training,status,model.parameters,model.training_flops"]
    rows[0] += ",measured.loss"
    losses = {}
    for number, one in enumerate(tiny_plan(tmp_path).trials):
        heads, serving = one.levels.values()
        loss = number + (100 * number if serving == "tied" else 0)
        losses.setdefault((heads, serving), []).append(loss)
        rows.append(f"{heads},{serving},{one.trial.training_id},done,{one.parameters},{one.flops}")
        rows[-1] += f",{loss}"
    path.write_text("\n".join(rows))
    pooled = np.mean([np.var(losses[h, "plain"], ddof=1) for h in ("mha", "mqa")]) ** 0.5
    found = expect(tmp_path, Store(tmp_path / "none"))
    assert found.spread.value == pytest.approx(pooled)
    assert (found.spread.sweep, found.spread.trainings) == ("reports/old", 4)
    assert "in 4 trainings of reports/old: about " in say(found)
    path.write_text("\n".join([*rows, rows[-1].rpartition(",")[0] + ","]))
    assert expect(tmp_path, Store(tmp_path / "none")).spread == found.spread, "a trial without it"
    path.write_text("\n".join(rows).replace(",done,", ",done,1"))
    assert expect(tmp_path, Store(tmp_path / "none")).spread is None, "of another size"
    path.write_text("status\n\0")
    assert expect(tmp_path, Store(tmp_path / "none")).spread is None


def test_one_seed_decides_nothing_and_levels_of_serving_alone_have_no_width(tmp_path):
    expected = expect(tmp_path, Store(tmp_path), SWEEP.replace("[0, 1]", "1") + DECIDE)
    assert say(expected).startswith("Precision: one seed ")
    assert expected.to_json()["half_widths_in_spreads"] == {}
    text = SWEEP.replace("    mqa: {model.n_kv_head: 1}\n", "") + DECIDE
    expected = expect(tmp_path, Store(tmp_path), text)
    assert (say(expected), expected.to_json()["half_widths_in_spreads"]) == ("", {})
    timed = (SWEEP + DECIDE).replace("metric: loss", "metric: tpot_ms_p50")
    assert expect(tmp_path, Store(tmp_path), timed) is None
    given = "{training.tokens: 0}\n    mqa: {training.tokens: 0, "
    untrained = (SWEEP + DECIDE).replace("{}\n    mqa: {", given)
    assert expect(tmp_path, Store(tmp_path), untrained) is None


LOOKS = SWEEP.replace("seeds: [0, 1]", "seeds: {looks: [2, 4, 6]}") + DECIDE


@needs("looks")
def test_a_look_that_decides_nothing_is_pointed_out_until_it_is_taken(tmp_path, store):
    expected = expect(tmp_path, store, LOOKS)
    assert expected.design.fewest_seeds == 6
    vain, *others = expected.to_json()["looks"]
    assert (vain["seeds"], vain["decides"]) == (2, False)
    assert [(one["seeds"], one["decides"]) for one in others] == [(4, True), (6, True)]
    assert expected.to_json()["looks_that_decide"] == [4, 6]
    line = say(expected).splitlines()[-1]
    assert f"|t| of {vain['t_bound']:,.0f} at 2 seeds" in line
    assert "looks: [4, 6] calls from |t| of " in line
    alone = LOOKS.replace("    mqa: {model.n_kv_head: 1}\n", "").replace("[2, 4, 6]", "[2, 8]")
    assert say(expect(tmp_path, store, alone)).startswith("Looks: a level is called only from |t|")
    nothing = expect(tmp_path, store, LOOKS.replace("[2, 4, 6]", "[2, 3]"))
    assert say(nothing).endswith("write seeds: 3.")
    better = expect(tmp_path, store, LOOKS.replace("[2, 4, 6]", "[4, 6]"))
    assert "Looks: " not in say(better)

    def stop_at_the_second(stage):
        if stage.number > 1:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        drive_looks(load_sweep(write_sweep(tmp_path, LOOKS)), store, on_stage=stop_at_the_second)
    taken = expect(tmp_path, store, LOOKS)
    assert taken.has_taken_looks
    assert "Looks: " not in say(taken), "it cannot be declared otherwise any more"
