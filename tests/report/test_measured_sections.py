"""Sections that show what few sweeps measure: probes, divergence, tasks, tuned and matched sizes."""

import numpy as np
import pytest
from scipy import stats

from kvlab.analysis.study import Study
from kvlab.fs.sealed_files import write_sealed_json
from kvlab.report.document import SERIES, Fold, Line, Points
from kvlab.report.paper import write_methods
from kvlab.report.sections import SECTIONS
from tests.report.reading import figures, load, markdown, rows, tables
from tests.support.record_factory import (
    TUNED_LOSSES,
    LmEvalRecord,
    MatchedRecord,
    QuantizedTrainingRecord,
    Record,
    SizedRecord,
    TunedRecord,
)


def make(name, record, folder):
    return SECTIONS[name].make(load(record, folder))


@pytest.mark.parametrize("name", ["probes", "quantized-training"])
def test_a_record_without_such_measurements_has_no_section(tmp_path, name):
    assert make(name, Record(), tmp_path) is None


class Probed(Record):
    def measurements(self, levels, seed):
        found = super().measurements(levels, seed)
        for ending, less in (("", 0.0), ("_served", 0.125)):
            found |= {f"recall_acc{ending}": 0.5 - less, f"recall_acc_far{ending}": 0.25 - less}
            found |= {f"loss_part{i}{ending}": 5.0 - i / 10 + less for i in range(1, 9)}
            if "rope" in levels.values():
                found[f"loss_beyond{ending}"] = 4.5 + less
        return found | {"recall_rows": 32, "recall_pairs": 64}


def test_probes_show_what_was_measured(tmp_path):
    found = make("probes", Probed(seeds=(0, 1)), tmp_path)
    recall, positions = tables(found).values()
    assert [column.title for column in recall.columns] == ["cell", "scored", "all", "far"]
    assert len(recall.rows) == 2 * 24
    for row in positions.rows:
        less = 0.125 if row.cells[1].text == "served" else 0.0
        beyond = pytest.approx(4.5 + less) if "rope" in row.cells[0].text else None
        assert row.cells[10].value == beyond
    (figure,) = figures(found).values()
    lines = figure.plot.layers
    assert len(lines) == 8 < 24, "as many as there are colours"
    assert (lines[0].name, {line.role for line in lines}) == ("baseline", set(SERIES))
    drawn = [(point.x, point.y) for point in lines[0].points]
    assert drawn == [pytest.approx((i, 5.0 - i / 10 + 0.125)) for i in range(1, 9)]


class Haystack(Record):
    """One cell finds the needle one-shot and not served, the others find none."""

    def result(self, levels, seed, status):
        line = {"length": 64, "depth": 0.5, "rows": 16, "chance": 5.5, "loss_absent": 6.0}
        gain = {"gain": 3.0 if "rope" in levels.values() else 0.9, "gain_served": 0.3}
        loss = {"loss": 6.0 - gain["gain"], "loss_served": 5.7, "loss_absent_served": 6.0,
                "loss_change": gain["gain"] - 0.3}  # fmt: skip
        line |= {**gain, **loss, "accuracy": 0.75, "accuracy_served": 0.0}
        line |= {f"{name}_stderr": 0.25 for name in (*gain, *loss, "accuracy", "accuracy_served")}
        return super().result(levels, seed, status) | {"needle": [line]}


def test_needles_that_serving_loses_are_marked_and_counted(tmp_path):
    record = Haystack(factors={"position": ("learned", "rope")}, seeds=(0, 1))
    found = make("probes", record, tmp_path)
    cells = {(r.cells[0].text, r.cells[2].text): r.cells[4] for r in tables(found)["needle"].rows}
    assert (cells["rope", "one-shot"].tone, cells["rope", "served"].tone) == ("good", "bad")
    assert {cells["baseline", way].tone for way in ("one-shot", "served")} == {""}
    assert cells["rope", "served"].text.endswith(", lost")
    assert "at 1 of 2 places, and 1 of these" in found.contents[1].spans[0]


def test_at_one_seed_the_needles_error_is_over_rows(tmp_path):
    found = make("probes", Haystack(factors={"position": ("learned",)}, seeds=(0,)), tmp_path)
    absent, at_half = tables(found)["needle"].rows[0].cells[3:5]
    assert absent.text == "6.000", "without a recorded error none is shown"
    assert at_half.text == "5.100 \N{PLUS-MINUS SIGN} 0.250"
    assert "at most 0.900 nats/token" in found.contents[1].spans[0]


KL = {"plain": 3e-14, "coarse": 2e-6, "tied": 0.01}
CHANGED = {"plain": 0.0, "coarse": 0.002, "tied": 0.11}
WINDOWS = 64


class Served(Record):
    """Divergences that spread by factors over seeds."""

    def measurements(self, levels, seed):
        level = levels["serving"]
        factor = np.random.default_rng([seed, len(level)]).lognormal(0, 0.1)
        found = super().measurements(levels, seed) | {"served_tokens": 256 * WINDOWS}
        for name, values in (("kl", KL), ("top_changed", CHANGED)):
            value = values[level] * factor
            found |= {f"serving_{name}": value, f"serving_{name}_stderr": value / 20}
        return found


@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2, 3, 4)])
def test_divergences_are_in_order_with_intervals_over_seeds_or_windows(tmp_path, seeds):
    study = load(Served(factors={"serving": tuple(KL)}, seeds=seeds), tmp_path)
    section = SECTIONS["serving-gap"].make(study)
    found = tables(section)["serving-divergence"].rows
    assert [row.cells[0].text for row in found] == ["coarse", "tied"], "plain is rounding"
    for row in found:
        kl, shares = (
            np.array(list(study.values((row.cells[0].text,), f"serving_{name}").values()))
            for name in ("kl", "top_changed")
        )
        if len(seeds) == 1:  # two cells, so each interval has half of the error
            reach = stats.t.ppf(1 - 0.05 / 2 / 2, WINDOWS - 1) / 20 * np.array([-1, 1])
            logs, ends = np.log(kl) + reach, shares * (1 + reach)
        else:
            logs, ends = (
                np.array(stats.ttest_1samp(x, 0).confidence_interval(1 - 0.05 / 2))
                for x in (np.log(kl), shares)
            )
        assert row.cells[2].value == pytest.approx(stats.gmean(kl))
        assert row.cells[3].csv == pytest.approx(tuple(np.exp(logs)))
        assert row.cells[4].value == pytest.approx(100 * shares.mean())
        assert row.cells[5].csv == pytest.approx(tuple(100 * ends))
    (figure,) = figures(section).values()
    assert figure.plot.x.kind == "log"


def test_rounding_is_no_effect(tmp_path):
    """Of plain caches a divergence of 1e-14 differs surely between cells, and means nothing."""

    class Rounded(Served):
        def measurements(self, levels, seed):
            level = list(KL).index(levels["serving"])
            exact = {"serving_kl": 1e-14 * (1 + level + seed / 100), "serving_top_changed": 0.0}
            return super().measurements(levels, seed) | exact

    study = load(Rounded(factors={"serving": tuple(KL)}), tmp_path)
    assert {e.verdict for e in study.effects("serving_kl")} == {"identical"}
    other = rows(SECTIONS["effects"].make(study), "effects-other")
    assert not [row for row in other if "KL" in row["measurement"]]


def test_eviction_is_what_cells_keep_and_drop(tmp_path):
    class Evicting(Record):
        def result(self, levels, seed, status):
            found = super().result(levels, seed, status)
            evict = {"keep": 64 if "mqa" in levels.values() else 32, "by": "heavy_hitters"}
            found["experiment"]["serving"] = {"evict": evict}
            found["measurements"]["evicted_share"] = 0.25
            return found

    section = make("serving-gap", Evicting(factors={"heads": ("mha", "mqa")}), tmp_path)
    found = [[cell.text for cell in row.cells] for row in tables(section)["eviction"].rows]
    assert found == [
        ["baseline", "32 tokens by heavy hitters", "25.0"],
        ["mqa", "64 tokens by heavy hitters", "25.0"],
    ]


def test_tuned_settings_and_what_they_follow_from(tmp_path):
    section = make("tuned", TunedRecord(), tmp_path)
    found, losses = (rows(section, name) for name in tables(section))
    assert [(row["architecture"], row["tuned"], row["recipe"]) for row in found] == [
        ("baseline", "0.00228", "0.0006"),
        ("mqa", "0.004", "0.0006"),
    ]
    assert [row["error (%)"] for row in found] == ["5.0", ""]
    fit = np.polyfit(np.log([1e-3, 2e-3, 4e-3]), [4.25, 4.05, 4.15], 2)
    for side, rate in (("lower", 1.14e-3), ("higher", 4.56e-3)):
        change = np.polyval(fit, np.log(rate)) - 4.03  # from the loss that the record has
        assert float(found[0][f"a step {side} (nats/token)"]) == pytest.approx(change)
    assert float(found[1]["a step lower (nats/token)"]) == pytest.approx(0.1)
    assert found[1]["a step higher (nats/token)"] == ""  # it diverged
    assert [row["why"] for row in found] == ["vertex", "the least measured, beside a divergence"]
    expected = [pair for points in TUNED_LOSSES.values() for pair in points.values()]
    for row, pair in zip(losses, expected, strict=True):
        mean, sd = row["loss (nats/token)"], row["loss sd (nats/token)"]
        if None in pair:
            assert mean == sd == ""
        else:
            assert float(mean) == pytest.approx(sum(pair) / 2)
            assert float(sd) == pytest.approx(0.1 / 2**0.5)
    (figure,) = figures(section).values()
    lines = [one for one in figure.plot.layers if isinstance(one, Line)]
    marks = [one.points[0] for one in figure.plot.layers if isinstance(one, Points)]
    assert [[point.x for point in line.points] for line in lines] == [[1e-3, 2e-3, 4e-3]] * 2
    assert [(mark.x, mark.y) for mark in marks] == [(2.28e-3, 4.03), (4e-3, 4.25)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": 4096}, ("fewer tokens (4,096)", "`mqa` has the least", "diverged at 1 of 2")),
        ({"is_over": False}, ("The tuning is not over",)),
    ],
)
def test_what_weakens_the_tuning_is_said(tmp_path, changes, words):
    text = markdown(load(TunedRecord(**changes), tmp_path, "tuned"))
    assert all(one in text for one in words)


def test_effects_with_and_without_matched_sizes(tmp_path):
    """One level in two ways is two tests: the intervals are those at half of alpha."""
    record = MatchedRecord()
    study = load(record, tmp_path)
    section = SECTIONS["matched"].make(study)
    effects = rows(section, "matched-effects")
    assert [row["sizes"] for row in effects] == ["none", "parameters"]
    for row, mode in zip(effects, record.modes, strict=True):
        worse, base = (study.values((heads, mode), "loss_served") for heads in ("mqa", "mha"))
        test = stats.ttest_1samp([worse[seed] - base[seed] for seed in record.seeds], 0.0)
        ends = [float(row[f"simultaneous 95% {end} (nats/token)"]) for end in ("low", "high")]
        assert ends == pytest.approx(test.confidence_interval(1 - 0.05 / 2))
    widths = rows(section, "matched")
    assert [row["ffn_dim"] for row in widths] == ["64", "64", "64", "70"]
    misses = [float(row["parameters off (%)"]) for row in widths]
    assert misses == pytest.approx([0.0, 0.0, -3.0, -0.1])


def test_answers_to_tasks_are_paired_with_the_baselines(tmp_path):
    """mqa answers 20 of 40 items wrong that mha has right, and none the other way round."""
    section = make("lm-eval", LmEvalRecord(factors={"heads": ("mha", "mqa")}, seeds=(0,)), tmp_path)
    (row,) = tables(section)["lm-eval-letters-acc"].rows
    texts = [one.text for one in row.cells]
    assert (texts[0], texts[3:5], texts[-1]) == ("mqa", ["0", "20"], "fewer right")
    assert row.cells[1].value == pytest.approx(-50.0)
    assert row.cells[5].value == pytest.approx(2 * 0.5**20), "McNemar's exact test over items"
    _, mean, error, perplexity, _ = rows(section, "lm-eval")[0].values()
    assert float(mean) == pytest.approx(75.0)
    assert float(error) == pytest.approx(100 * (0.75 * 0.25 / 39) ** 0.5), "over items"
    assert float(perplexity) == pytest.approx(20.0)


def test_answers_to_other_items_are_not_paired(tmp_path):
    store = LmEvalRecord(factors={"heads": ("mha", "mqa")}, seeds=(0,)).write(tmp_path)
    row = next(r for r in Study.load(store, "made").done_rows if r.levels == ("mqa",))
    tasks = store.tasks(row.trial)
    tasks["letters"]["items"] = "another set"
    path = store.trial_directory(row.trial) / "result.json"
    files = store.write_details(row.trial, tasks=tasks)
    write_sealed_json(path, {**store.result(row.trial), "files": files})
    section = SECTIONS["lm-eval"].make(Study.load(store, "made"))
    assert "1 trial answered other items than the baseline" in str(section.contents[0])


def test_quantized_trainings_beside_the_same_recipe_in_float(tmp_path):
    def status(levels, seed):
        return "failed" if levels == {"mlp": "swiglu", "int8": "none"} and seed == 2 else "done"

    study = load(QuantizedTrainingRecord(status=status), tmp_path, "quantized-training")
    table = tables(SECTIONS["quantized-training"].make(study))["quantized-training"]
    names = [column.title for column in table.columns]
    found = [dict(zip(names, (c.text for c in row.cells), strict=True)) for row in table.rows]
    heads = ("change", "of float (speed)", "of float (peak memory)", "pairs")
    shown = [tuple(row[head] for head in heads) for row in found]
    empty = found[0]["change"]
    times = "\N{MULTIPLICATION SIGN}"
    assert shown[0] == shown[2] == (empty,) * 4, "float cells stand beside"
    assert shown[1] == ("+0.0200 \N{PLUS-MINUS SIGN} 0.0000", f"1.50{times}", f"0.800{times}", "3")
    assert shown[3][1:] == (f"0.750{times}", f"0.800{times}", "2"), "without the failed pair"
    assert found[1]["int8 products"] == "output, grad_weight"
    assert (found[0]["kernel"], found[1]["kernel"]) == (empty, "cublas")
    assert f"output of blocks.0.mlp.up: 64 {times} 20" in markdown(study)
    methods = write_methods(study)
    assert "in int8, with a dynamic scale for each row and column" in methods
    assert r"output, grad\_weight" in methods
    assert "wortsman2023stable" in methods


@pytest.mark.parametrize("noise", [0.001, 0.3])
def test_predictions_are_printed_where_they_say_something(tmp_path, noise):
    """One that contains zero and reaches beyond the margin says nothing."""
    section = make("size-trends", SizedRecord(predict=(3e7, 1e8), noise=noise), tmp_path)
    folds = [c for c in section.contents if isinstance(c, Fold) and c.title == "Predictions"]
    contents = [content for fold in folds for content in fold.contents]
    rows = [[*row.cells] for content in contents for row in getattr(content, "rows", ())]
    found = {(row[1].text, row[2].text): row[4].value for row in rows}
    if noise == 0.3:
        assert not found
    else:
        assert found["mqa", "30 M"] == pytest.approx(0.1 - 0.04 * 1.4771, abs=0.01)
        assert found["rope", "100 M"] == pytest.approx(-0.05, abs=0.01)
