"""Trainings that diverge: how often, on which side, and what is said of the level."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.analysis.divergence import count_divergence
from kvlab.analysis.effects import estimate_main_effects
from kvlab.analysis.statistics import sign_flip_test
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import TrialRow
from tests.support.record_factory import Record

FACTORS = {"heads": ("mha", "mqa"), "position": ("learned", "rope")}


def study(tmp_path, status, **changes):
    record = Record(factors=FACTORS, status=status, seeds=tuple(range(6)), **changes)
    return Study.load(record.write(tmp_path / "store"), record.name)


def effects(study, metric="loss"):
    return {effect.name: effect for effect in study.effects(metric)}


def test_a_level_that_diverges_is_not_better(tmp_path):
    """rope is better by 0.05 where it ends, and one in twelve of its trainings does not."""

    def status(levels, seed):
        lost = levels["position"] == "rope" and levels["heads"] == "mha" and seed == 2
        return "diverged" if lost else "done"

    found = effects(study(tmp_path, status))
    rope = found["position=rope"]
    assert (rope.verdict, rope.is_significant, rope.has_interval) == ("diverged", False, False)
    assert (rope.divergence.level, rope.divergence.partner, rope.divergence.pairs) == (1, 0, 12)
    assert rope.value < -0.03, "the difference of those that ended is shown"
    time = effects(study(tmp_path, status), "tpot_ms_p50")["position=rope"]
    assert time.verdict_name != "diverged", "how fast it decodes has nothing to do with it"
    failed = effects(study(tmp_path / "2", lambda *at: status(*at).replace("diverged", "failed")))
    assert failed["position=rope"].verdict == "better", "a trial that was killed says nothing"


def test_settings_without_a_diverged_training_are_compared(tmp_path):
    def status(levels, seed):
        return "diverged" if levels["position"] == "rope" and seed < 2 else "done"

    heads = effects(study(tmp_path, status))["heads=mqa"]
    assert (heads.verdict, heads.pairs_used, heads.pairs_designed) == ("worse", 6, 12)
    assert heads.divergence.both == 2 * 1
    assert dict(heads.limits)["position"] == ("learned",)


def test_a_level_is_not_worse_because_its_baseline_diverged(tmp_path):
    def status(levels, seed):
        return "diverged" if levels["heads"] == "mha" and seed < 3 else "done"

    heads = effects(study(tmp_path, status))["heads=mqa"]
    assert heads.verdict == "baseline diverged"
    assert (heads.divergence.level, heads.divergence.partner) == (0, 6)


def test_a_level_that_always_diverges_is_named(tmp_path):
    def status(levels, _seed):
        return "diverged" if levels["position"] == "rope" else "done"

    rope = effects(study(tmp_path, status))["position=rope"]
    assert (rope.estimate, rope.verdict, rope.divergence.level) == (None, "diverged", 12)
    assert rope.divergence.p == 2**-5


def test_the_test_flips_the_signs_of_seeds():
    def row(cell, seed, status):
        return TrialRow((cell,), seed, f"{cell}{seed}", status)

    states = {"on": "ddodo", "off": "ooodo"}  # d: diverged, o: done
    cells = {
        (cell,): {
            seed: row(cell, seed, "diverged" if one == "d" else "done")
            for seed, one in enumerate(text)
        }
        for cell, text in states.items()
    }
    found = count_divergence(cells, [((1, ("on",)), (-1, ("off",)))])
    assert (found.level, found.partner, found.both, found.pairs) == (2, 0, 1, 5)
    assert found.p == sign_flip_test([1, 1, 0, 0, 0]) == 0.5


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from(["done", "diverged", "failed"]), min_size=16, max_size=16),
    st.integers(0, 9),
)
def test_nothing_that_diverged_is_better_or_cheap(statuses, draw):
    random = np.random.default_rng(draw)
    cells = {}
    for number, levels in enumerate(
        [("mha", "learned"), ("mha", "rope"), ("mqa", "learned"), ("mqa", "rope")]
    ):
        for seed in range(4):
            loss = 4 + random.normal(0, 0.001) - 0.1 * ("mqa" in levels)
            row = TrialRow(
                levels, seed, f"{number}.{seed}", statuses[4 * number + seed], f"{number}.{seed}",
                {"loss": loss},
            )  # fmt: skip
            cells.setdefault(levels, {})[seed] = row
    for effect in estimate_main_effects(cells, FACTORS, "loss", margin=0.5):
        index = list(FACTORS).index(effect.change[0][0])
        worse_off = 0
        for levels, by_seed in cells.items():
            if levels[index] == effect.change[0][1]:
                partner = list(levels)
                partner[index] = list(FACTORS.values())[index][0]
                worse_off += sum(
                    row.status == "diverged" and cells[tuple(partner)][s].status != "diverged"
                    for s, row in by_seed.items()
                )
        if worse_off:
            assert effect.verdict_name in ("diverged", "worse", "baseline diverged")
