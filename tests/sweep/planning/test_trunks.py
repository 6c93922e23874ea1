"""Token budgets under wsd: planned with a shared stable phase, trained once, removed after."""

import json

import pytest

from kvlab.spec import load_sweep
from kvlab.store import Store
from kvlab.sweep import plan
from kvlab.sweep.driver.trial_queue import TrunkWaitlist, order_trials
from kvlab.sweep.planning.planner import describe_sweep
from kvlab.trial.run import run_task
from tests.support import stub_trials as stub
from tests.support import tiny_sweep
from tests.support.stub_trials import tiny_plan
from tests.support.tiny_sweep import TRUNK_EXPERIMENT, run_kvlab, tiny_sweep_folder

RECIPE = "{training.tokens: %d, training.schedule: wsd, training.decay_tokens: 64%s}"
BUDGETS = f"""\
question: What do more tokens buy?
experiment: e.yaml
factors:
  budget:
    short: {RECIPE % (160, ", training.warmup_tokens: 32")}
    long: {RECIPE % (640, ", training.warmup_tokens: 32")}
    middle: {RECIPE % (320, ", training.warmup_tokens: 32")}
seeds: [0, 1]
"""


def branches(planned):
    """Return the shared steps, the source's budget and the saved steps of every trial."""
    budgets = {one.trial.id: one.levels["budget"] for one in planned.trials}
    return {
        (one.levels["budget"], one.trial.seed): (
            one.trial.shared_steps,
            budgets.get(one.branch.source),
            one.branch.steps,
        )
        for one in planned.trials
    }


def test_budgets_share_the_stable_phase_of_the_longest_at_every_seed(tmp_path):
    planned = tiny_plan(tmp_path, text=BUDGETS)
    of_seed = {
        "short": ((6,), "long", 6),
        "long": ((6, 16), None, 0),
        "middle": ((6, 16), "long", 16),
    }
    assert branches(planned) == {(b, seed): of_seed[b] for b in of_seed for seed in (0, 1)}
    assert planned.saved_tokens == 2 * (6 + 16) * 16
    assert planned.tokens == 2 * (160 + 640 + 320) - planned.saved_tokens
    assert planned.flops < sum(one.flops for one in planned.trials)
    text = "4 trainings branch from a shared stable phase, which saves 704 tokens"
    assert text in planned.format_totals()
    other_decay = BUDGETS.replace("decay_tokens: 64, training.warmup_tokens: 32}", "decay_tokens: 32,"
        " training.warmup_tokens: 32, training.final_learning_rate: 0}", 1)  # fmt: skip
    assert branches(tiny_plan(tmp_path, text=other_decay))["short", 0] == ((8,), "long", 8)


def test_ids_are_those_of_budgets_that_are_planned_alone(tmp_path):
    together = {
        one.levels["budget"]: one.trial.id for one in tiny_plan(tmp_path, None, BUDGETS).trials
    }
    lines = [line for line in BUDGETS.splitlines() if "long:" not in line and "middle:" not in line]
    alone = tiny_plan(tmp_path, text="\n".join(lines))
    assert alone.trials[1].trial.id == together["short"]
    assert (alone.saved_tokens, alone.trials[0].trial.shared_steps) == (0, ())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("", "the default warm-up is a share of the tokens"),
        (", training.warmup_tokens: 48", "another warm-up"),
        (", training.warmup_tokens: 32, model.n_kv_head: 1", "another model"),
    ],
)
def test_what_differs_before_the_decay_is_not_shared(tmp_path, change, why):
    middle = RECIPE % (320, change)
    lines = [line for line in BUDGETS.splitlines() if "long:" not in line]
    lines = [f"    middle: {middle}" if "middle:" in line else line for line in lines]
    planned = tiny_plan(tmp_path, text="\n".join(lines))
    assert planned.saved_tokens == 0, why
    assert not any(one.trial.shared_steps for one in planned.trials)


def test_the_longest_budget_starts_first_and_the_others_wait_for_their_branch_points(
    tmp_path, store
):
    planned = tiny_plan(tmp_path, store, BUDGETS)
    ordered = order_trials(planned.trials)
    for seed in (0, 1):
        assert next(p.levels["budget"] for p in ordered if p.trial.seed == seed) == "long"
    by_budget = {one.levels["budget"]: one for one in planned.trials if one.trial.seed == 0}
    running = [by_budget["long"]]
    waitlist = TrunkWaitlist(store, lambda: running)
    short, middle = by_budget["short"].trial, by_budget["middle"].trial
    assert waitlist.is_worthwhile(short)
    assert waitlist.is_worthwhile(middle)
    other_seed = next(p.trial for p in planned.trials if p.trial.seed == 1)
    assert not waitlist.is_worthwhile(other_seed)
    waitlist.add(by_budget["short"])
    waitlist.add(by_budget["middle"])
    assert waitlist.pop_ready() == []
    (store.trunk_directory(short.trunk_id) / "step-00000006").mkdir(parents=True)
    assert waitlist.pop_ready() == [by_budget["short"]]
    running.clear()
    assert waitlist.pop_ready() == [by_budget["middle"]]


def test_driven_budgets_train_their_stable_phase_once(tmp_path):
    with tiny_sweep_folder(tmp_path, tiny_sweep.BUDGETS, TRUNK_EXPERIMENT):
        facts = json.loads(run_kvlab("plan", "s.yaml", "--json")[1])
        assert facts["totals"]["training_tokens_saved"] == 448 + 768
        store = Store("runs")
        planned = plan(load_sweep("s.yaml"), store)
        summary = stub.drive(planned, store, lambda trial: run_task(trial, store.path))
        assert summary.states["done"] == 3
        records = {
            one.tokens: store.result(one.trial.id)["training_record"] for one in planned.trials
        }
        branched = {tokens: one["branched_at"] for tokens, one in records.items()}
        assert branched == {640: 7, 960: 12, 1280: None}
        assert [len(one["resumed_from"]) for one in records.values()] == [1, 0, 1]
        store.write_sweep(describe_sweep(planned, yaml="", experiment_yaml="", command=""))
        trunk = next((tmp_path / "runs" / "trunks").iterdir()).name
        assert store.trunk_steps(trunk) == [7, 12]
        longer = tiny_sweep.BUDGETS + "    t1600: {training.tokens: 1600}\n"
        (tmp_path / "s.yaml").write_text(longer)
        assert "branches from the store after step 12" in run_kvlab("plan", "s.yaml")[1]
        gc = pytest.importorskip("kvlab.extensions.gc.garbage")
        [garbage] = [item for item in gc.find_garbage(store) if item.path.name == trunk]
        assert gc.remove_garbage(garbage)
        assert store.trunk_steps(trunk) == []
