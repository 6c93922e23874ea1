"""Serving gaps: exact sign flips over trainings, of several cells together; diverged trainings."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvlab.analysis.permutation_tests import (
    count_divergence,
    fewest_trainings,
    joint_sign_flip_test,
    judge_gaps,
)

from kvlab.analysis.effects import estimate_main_effects
from kvlab.analysis.statistics import sign_flip_test
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import TrialRow
from kvlab.report.report_files import make_document
from tests.support.record_factory import Record


def brute_force(rows):
    """Every pattern of signs of every seed, row by row."""
    seeds = sorted({seed for row in rows for seed in row})

    def size(row, signs):
        total = sum(signs[seeds.index(seed)] * value for seed, value in row.items())
        return abs(total) / sum(value**2 for value in row.values()) ** 0.5

    patterns = list(itertools.product((-1, 1), repeat=len(seeds)))
    largest = [max(size(row, signs) for row in rows) for signs in patterns]
    ones = [1] * len(seeds)
    return [np.mean([one >= size(row, ones) - 1e-12 for one in largest]) for row in rows]


def test_by_brute_force():
    random = np.random.default_rng(1)
    rows = [dict(enumerate(random.exponential(size=6) - 0.3)) for _ in range(4)]
    del rows[1][2], rows[3][5]
    found = joint_sign_flip_test(rows)
    assert [p for p, _ in found] == pytest.approx(brute_force(rows))
    alone = [brute_force([row])[0] for row in rows]
    assert [own for _, own in found] == pytest.approx(alone)


def test_one_row_is_the_sign_flip_test():
    values = np.random.default_rng(2).normal(0.5, 1, 9)
    p = sign_flip_test(values.tolist())
    assert joint_sign_flip_test([dict(enumerate(values))]) == [(p, p)]


def test_many_seeds_are_sampled_and_repeatable():
    values = np.random.default_rng(3).normal(0.4, 1, (2, 30))
    rows = [dict(enumerate(row)) for row in values]
    found = joint_sign_flip_test(rows)
    assert found == joint_sign_flip_test(rows)
    alone = [sign_flip_test(row.tolist()) for row in values]
    assert all(one <= both + 0.005 for one, (both, _) in zip(alone, found, strict=True))


def test_five_trainings_are_too_few_and_six_are_enough():
    assert [fewest_trainings(alpha) for alpha in (0.05, 0.01, 0.2)] == [6, 8, 4]
    for count, called in ((5, False), (6, True)):
        gaps = judge_gaps([dict.fromkeys(range(count), 0.02), {0: 1e-5, 1: 1e-5}], 0.05, 1e-4)
        assert gaps[0].can_be_found == gaps[0].is_found == called
        assert gaps[0].p == 2.0 ** (1 - count)
        assert (gaps[1].p, gaps[1].is_found) == (1.0, False)


def test_a_gap_that_passes_alone_and_not_among_all_cells_is_suggestive():
    random = np.random.default_rng(6)
    noise = [dict(enumerate(random.normal(0, 0.02, 7))) for _ in range(20)]
    clear = {0: 0.01, 1: 0.02, 2: 0.01, 3: 0.03, 4: 0.02, 5: 0.01, 6: -0.004}
    gap, *_ = judge_gaps([clear, *noise], 0.05, 1e-4)
    assert gap.own_p == pytest.approx(4 / 2**7)
    assert gap.p > 0.05
    assert gap.is_suggestive
    assert not gap.is_found
    (alone,) = judge_gaps([clear], 0.05, 1e-4)
    assert alone.is_found
    assert not alone.is_suggestive


def test_skewed_gaps_around_zero_are_called_rarely():
    """Symmetric with heavy tails, correlated between cells: of 400 sweeps 5% are 20."""
    random = np.random.default_rng(5)
    wrong = 0
    for _ in range(400):
        shared = random.standard_t(2, size=7)
        gaps = shared * random.exponential(size=(5, 7)) + 0.1 * random.standard_t(2, size=(5, 7))
        wrong += any(
            one.is_found for one in judge_gaps([dict(enumerate(g)) for g in gaps], 0.05, 0.0)
        )
    assert wrong <= 29  # two standard errors above 20


# Trainings that diverge


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


def test_the_report_lists_divergence_before_the_effects(tmp_path):
    def status(levels, seed):
        return "diverged" if levels["position"] == "rope" and seed == 0 else "done"

    document = make_document(study(tmp_path, status))
    names = list(document.sections)
    assert names.index("divergence") < names.index("effects")
    (table,) = (one for one in document.tables if one.name == "divergence")
    (rope,) = (row for row in table.rows if row.cells[1].text == "rope")
    assert [one.text for one in rope.cells[3:]] == ["12", "2", "0", "0", "1.000"]
    (effects_table,) = (one for one in document.tables if one.name == "effects")
    heads = [column.title for column in effects_table.columns]
    rows = [dict(zip(heads, row.cells, strict=True)) for row in effects_table.rows]
    (rope,) = (row for row in rows if row["level"].text == "rope")
    assert (rope["verdict"].text, rope["diverged"].text) == ("diverged", "2 of 12, partner 0")
    whole = make_document(study(tmp_path / "whole", lambda _levels, _seed: "done"))
    assert "divergence" not in whole.sections


def test_one_sided_divergence_needs_six_seeds_to_be_significant(tmp_path):
    def status(levels, seed):
        return "diverged" if levels["position"] == "rope" and seed < 5 else "done"

    p = effects(study(tmp_path, status))["position=rope"].divergence.p
    assert p == pytest.approx(2 / 2**5)
