"""Effects of a fractional design against least squares on the same numbers."""

import numpy as np
import pytest

from kvlab.report import write_report
from kvlab.report.study import Study
from tests.report.factory import EFFECTS, Record

FACTORS = {
    "heads": ("mha", "mqa"),
    "position": ("learned", "rope"),
    "horizon": ("global", "hybrid"),
    "sharing": ("none", "trained"),
}


def odd(levels):
    return sum(levels[f] != names[0] for f, names in FACTORS.items()) % 2 == 1


def half(tmp_path, **changes):
    record = Record(factors=FACTORS, exclude=odd, design="fractional:2", **changes)
    return Study.load(record.write(tmp_path / "store"), record.name)


def test_contrasts_are_the_main_effects_of_a_linear_model(tmp_path):
    study = half(tmp_path, noise=0.02)
    effects = {one.change[0][0]: one for one in study.effects("loss")}
    cells = list(study.cells)
    design = np.array(
        [
            [1.0, *(level != base for level, base in zip(c, study.baseline, strict=True))]
            for c in cells
        ]
    )
    by_seed = {}
    for seed in study.seeds:
        losses = np.array([study.values(cell, "loss")[seed] for cell in cells])
        by_seed[seed] = np.linalg.lstsq(design, losses, rcond=None)[0][1:]
    for place, factor in enumerate(FACTORS):
        found = effects[factor]
        wanted = [by_seed[seed][place] for seed in study.seeds]
        assert [value for _, value in found.by_seed] == pytest.approx(wanted)
        assert found.estimate.value == pytest.approx(np.mean(wanted))
        assert found.estimate.error == pytest.approx(np.std(wanted, ddof=1) / len(wanted) ** 0.5)


def test_known_effects_are_recovered(tmp_path):
    for one in half(tmp_path, seeds=(0, 1, 2, 3, 4)).effects("loss"):
        assert one.estimate.low < EFFECTS[one.change[0][1]] < one.estimate.high
        assert one.corrected >= one.estimate.p


def test_a_seed_without_all_cells_is_left_out(tmp_path):
    def status(levels, seed):
        return "failed" if seed == 1 and levels["heads"] == "mqa" else "done"

    one = half(tmp_path, status=status).effects("loss")[0]
    assert (one.seeds, one.comparisons, one.designed) == ((0, 2), 2, 3)


def test_nothing_is_claimed_without_any_whole_seed(tmp_path):
    effects = half(
        tmp_path, status=lambda levels, _: "failed" if levels["heads"] == "mqa" else "done"
    )
    assert {one.verdict for one in effects.effects("loss")} == {"no matched pair"}


def test_the_report_names_the_design_and_its_aliasing(tmp_path):
    note = "heads*position is aliased with +horizon*sharing"
    record = Record(factors=FACTORS, exclude=odd, design="fractional:2", notes=(note,))
    write_report(record.write(tmp_path / "store"), record.name, tmp_path / "reports")
    text = (tmp_path / "reports" / "made" / "report.md").read_text()
    assert "A 1/2 fractional factorial design: 8 cells" in text
    assert note in text.replace("\\", "")
    assert "An effect is a contrast" in text
