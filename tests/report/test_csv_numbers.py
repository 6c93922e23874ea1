"""Every column of every CSV of a full report, compared with what its head says that it holds."""

import csv
import io
import math
import re
from statistics import mean, stdev

import pytest
from scipy import stats

from kvlab.analysis.study import Study
from kvlab.report.document import EMPTY_CELL, Cell, Column, Row, Table, cell
from kvlab.report.report_files import make_document
from kvlab.report.sections import SECTIONS
from kvlab.report.table_export import table_to_csv
from kvlab.spec import load_served_model
from kvlab.store.metrics import METRICS
from tests.report.full_record import (
    BASE,
    BUDGETS,
    FACTORS,
    FAILED,
    ITEMS,
    NEEDLE_DEPTHS,
    PRUNED,
    RECORD,
    TEXTS,
    against,
    average,
    levels_of,
    needle_line,
    values,
)
from tests.support.holm import holm_correction

GB = 10**9


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return Study.load(RECORD.write(tmp_path_factory.mktemp("store")), "made")


@pytest.fixture(scope="module")
def tables(study):
    """Name -> rows, each a mapping of heads to texts."""
    document = make_document(study)
    elsewhere = {"size-trends", "tuned", "matched", "divergence", "lm-eval"}  # own records
    assert document.sections.keys() == SECTIONS.keys() - elsewhere, "nothing to check"
    return {t.name: list(csv.DictReader(io.StringIO(table_to_csv(t)))) for t in document.tables}


def near(text, expected):
    assert float(text) == pytest.approx(expected, rel=1e-9, abs=1e-12)


# Columns that hold a cell's mean over seeds of a metric, times a factor; with their spreads.
MEANS = {
    ("cells", "served loss", "nats/token"): ("loss_served", 1),
    ("cells", "one-shot loss", "nats/token"): ("loss", 1),
    ("serving-gap", "one-shot loss", "nats/token"): ("loss", 1),
    ("serving-gap", "served loss", "nats/token"): ("loss_served", 1),
    ("serving-gap", "gap", "nats/token"): ("serving_gap", 1),
    ("kv-dtype", "loss change", "nats/token"): ("kv_dtype_loss_change", 1),
    **{("serving-kl-positions", f"{i}/8", "nats/token"): (f"serving_kl_part{i}", 1)
       for i in range(1, 9)},
    **{("serving-top-positions", f"{i}/8", "%"): (f"serving_top_changed_part{i}", 100)
       for i in range(1, 9)},
    ("reuse", "hit rate", "%"): ("reuse_hit_rate", 100),
    ("reuse", "FLOPs saved", "%"): ("reuse_flops_saved", 100),
    ("reuse", "warm", "ms"): ("reuse_warm_ttft_ms", 1),
    ("reuse", "cold", "ms"): ("reuse_cold_ttft_ms", 1),
    ("reuse", "serving gap", "nats/token"): ("serving_gap", 1),
    ("reuse", "reuse gap", "nats/token"): ("reuse_gap", 1),
    ("reuse", "KL(cold || warm)", "nats/token"): ("reuse_kl", 1),
    ("quantized-training", "served loss", "nats/token"): ("loss_served", 1),
    ("quantized-training", "speed", "tokens/s"): ("training_tokens_per_second", 1),
    ("quantized-training", "peak memory", "MiB"): ("training_peak_bytes", 2**-20),
    ("speed", "first token", "ms"): ("ttft_ms", 1),
    ("speed", "per token p50", "ms"): ("tpot_ms_p50", 1),
    ("speed", "per token p95", "ms"): ("tpot_ms_p95", 1),
    ("speed", "per token p99", "ms"): ("tpot_ms_p99", 1),
    ("speed", "per token, no cache", "ms"): ("tpot_ms_uncached_p50", 1),
    ("speed", "tokens/s, largest batch", ""): ("tokens_per_second", 1),
    **{("recall", head, "%"): (f"recall_acc{end}", 100)
       for head, end in (("all", ""), ("near", "_near"), ("far", "_far"))},
    **{("positions", f"{i}/8", "nats/token"): (f"loss_part{i}", 1) for i in range(1, 9)},
    ("positions", "beyond", "nats/token"): ("loss_beyond", 1),
}  # fmt: skip


def ranked(levels, metric):
    return average(BASE, metric) + against(levels, BASE, metric)[0]


TIED = [{"heads": heads, "sharing": "tied"} for heads in FACTORS["heads"]]


def gap_test(levels):
    """The interval of a tied cell's gap by Bonferroni over both tied cells, and Holm's p-value."""
    tests = [stats.ttest_1samp(list(values(c, "serving_gap").values()), 0.0) for c in TIED]
    interval = tests[TIED.index(levels)].confidence_interval(1 - 0.05 / len(TIED))
    p = holm_correction([test.pvalue for test in tests])[TIED.index(levels)]
    return interval.low, interval.high, p


# Others that are a number of the row's cell.
CELLS = {
    ("ablation", "served loss (nats/token)"): lambda c: average(c, "loss_served"),
    ("ablation", "against baseline (nats/token)"): lambda c: against(c, BASE, "loss_served")[0],
    ("ablation", "K/V cache (bytes)"): RECORD.bytes,
    ("ablation", "smaller"): lambda c: RECORD.bytes(BASE) / RECORD.bytes(c),
    ("ablation", "change in parameters"): lambda c: -0.03 * ("mqa" in c.values()),
    ("ablation", "serving gap (nats/token)"): lambda c: average(c, "serving_gap"),
    ("cells", "n"): lambda c: len(values(c, "loss")),
    ("cells", "K/V cache (bytes)"): RECORD.bytes,
    ("cells", "perplexity"): lambda c: math.exp(average(c, "loss_served")),
    ("cells", "smaller"): lambda c: RECORD.bytes(BASE) / RECORD.bytes(c),
    ("cells", "against baseline (nats/token)"): lambda c: against(c, BASE, "loss_served")[0],
    ("pareto", "K/V cache (bytes)"): RECORD.bytes,
    ("pareto", "smaller"): lambda c: RECORD.bytes(BASE) / RECORD.bytes(c),
    ("pareto", "served loss (nats/token)"): lambda c: ranked(c, "loss_served"),
    ("pareto", "against baseline (nats/token)"): lambda c: against(c, BASE, "loss_served")[0],
    ("serving-gap", "n"): lambda c: len(values(c, "loss")),
    ("serving-gap", "smallest gap (nats/token)"): lambda c: min(values(c, "serving_gap").values()),
    ("serving-gap", "largest gap (nats/token)"): lambda c: max(values(c, "serving_gap").values()),
    ("serving-gap", "p"): lambda c: gap_test(c)[2],
    ("serving-gap", "simultaneous 95% low (nats/token)"): lambda c: gap_test(c)[0],
    ("serving-gap", "simultaneous 95% high (nats/token)"): lambda c: gap_test(c)[1],
    ("kv-dtype", "logit error, rms (nats)"): lambda c: average(c, "kv_dtype_logit_rms"),
    ("kv-dtype", "logit error, largest (nats)"): lambda c: average(c, "kv_dtype_logit_largest"),
    ("eviction", "dropped (%)"): lambda c: 100 * average(c, "evicted_share"),
    ("memory", "K/V cache (bytes)"): RECORD.bytes,
    ("memory", "storages least (bytes)"): RECORD.bytes,
    ("memory", "storages most (bytes)"): RECORD.bytes,
    ("memory", "read per token (bytes)"): lambda c: average(c, "kv_bytes_read"),
    ("memory", "peak with cache (bytes)"): lambda c: average(c, "peak_bytes_cached"),
    ("memory", "peak without (bytes)"): lambda c: average(c, "peak_bytes_uncached"),
    ("memory", "activations (bytes)"):
        lambda c: max(values(c, "peak_bytes_activations").values()),
    ("quantized-training", "pairs"): lambda _: 0,
    ("speed", "disturbed"): lambda c: int(0 in values(c, "loss")),
    ("speed", "n"): lambda c: len(values(c, "loss")),
    ("roofline", "batch"): lambda _: 1,
    ("roofline", "context"): lambda _: 64,
    ("roofline", "GFLOPs"): lambda _: 10**7 / GB,
    ("roofline", "weights (bytes)"): lambda _: 10**6,
    ("roofline", "K/V read (bytes)"): lambda _: 10**5,
    ("roofline", "predicted (ms)"): lambda _: 0.5,
    ("roofline", "measured (ms)"):
        lambda c: 1000 * mean(RECORD.seconds(c, seed) for seed in values(c, "loss")),
    ("roofline", "MBU (%)"): lambda _: 40.0,
    ("roofline", "MFU (%)"): lambda _: 10.0,
    ("reuse", "warm/cold (times)"):
        lambda c: mean((2 + seed) / (8 + seed) for seed in values(c, "loss")),
    ("reuse", "warm/cold sd (times)"):
        lambda c: stdev((2 + seed) / (8 + seed) for seed in values(c, "loss")),
    ("reuse-budgets", "a conversation (bytes)"): lambda c: average(c, "reuse_conversation_bytes"),
    **{("reuse-budgets", f"conversations that fit {budget:,} B"):
        lambda c, budget=budget: budget // average(c, "reuse_conversation_bytes")
       for budget in BUDGETS},
    **{("reuse-budgets", f"hit rate in {budget:,} B (%)"):
        lambda c, n=n: 100 * (average(c, "reuse_hit_rate") + 0.1 * n)
       for n, budget in enumerate(BUDGETS)},
    ("starts", "copied"): lambda _: 2,
    ("starts", "pooled"): lambda _: 1,
    ("starts", "averaged"): lambda _: 0,
    ("starts", "own first values"): lambda _: 1,
    ("starts", "left over"): lambda _: 1,
    ("failures", "seed"): lambda _: FAILED[1],
    ("failures", "attempts"): lambda _: 1,
    ("pruned", "seed"): lambda _: PRUNED[1],
    ("pruned", "steps"): lambda _: 30,
    ("pruned", "of"): lambda _: 150,
    ("pruned", "validation loss there (nats/token)"): lambda _: 5.5,
}  # fmt: skip

OWN_TESTS = {"interval-widths", "effects", "effects-other", "interactions", "equal-memory", "fronts", "hellaswag",
             "hellaswag-one-shot", "hellaswag-cache", "provenance",
             "break-even", "serving-divergence", "needle", "needle-accuracy"}  # fmt: skip
"""Tables whose numbers have a test of their own below."""

UNPAIRED = {"change (nats/token)", "change sd (nats/token)", "of float (speed)",
            "of float (peak memory)"}  # fmt: skip
"""Columns of quantized-training that are empty here: no trial has the same recipe in float."""

RANGE = re.compile(r"[\d.]\s*(to|of|[\u00b1\u00d7\u2013])\s*[-+\u2212]?\d|\u2212\d")


def test_every_column_is_text_or_numbers_alone(tables):
    for name, rows in tables.items():
        assert rows, name
        for head in rows[0].keys() - (UNPAIRED if name == "quantized-training" else set()):
            found = [row[head] for row in rows if row[head]]
            if head in TEXTS.get(name, ()) or (name == "fronts" and head != "fronts"):
                assert not [text for text in found if RANGE.search(text)], (name, head)
            else:
                assert [float(text) for text in found], (name, head)


def test_every_number_of_a_cell_is_in_its_heads_unit(tables):
    checked = set()
    for name, rows in tables.items():
        if name in OWN_TESTS | {"factors"}:
            continue
        for row in rows:
            levels = {f: row[f] for f in FACTORS} if name == "cells" else levels_of(row["cell"])
            ending = "_served" if row.get("scored") == "served" else ""
            unpaired = UNPAIRED if name == "quantized-training" else set()
            assert not any(row[head] for head in unpaired)
            for head in row.keys() - set(TEXTS[name]) - unpaired:
                if "simultaneous" in head and name != "serving-gap":
                    continue
                plain, _, unit = head.rstrip(")").partition(" (")
                key = (name, plain.removesuffix(" sd"), unit)
                if (name, head) in CELLS:
                    expected = CELLS[name, head](levels)
                else:
                    metric, factor = MEANS[key]
                    seen = [factor * v for v in values(levels, metric + ending).values()]
                    expected = stdev(seen) if plain.endswith(" sd") else mean(seen)
                if (name == "cells" and levels == BASE and ("CI" in head or "against" in head)) or (
                    name in ("ablation", "pareto") and levels == BASE and "against" in head
                ):
                    assert row[head] == ""
                elif row[head]:  # an exact difference has no interval
                    near(row[head], expected)
                    checked.add((name, head))
    assert {key for key in CELLS if key not in checked} == set()
    assert {(n, f"{p} ({u})" if u else p) for n, p, u in MEANS} <= checked


def differences_by_seed(row):
    """A level minus its factor's baseline by seed, straight from the record.

    Cells that are served otherwise than they were trained enter no mean over settings. mqa+trained
    misses the seeds 1 and 3, so means over both settings are over the others.
    """
    factor, level = row["factor"], row["level"]
    (other,) = FACTORS.keys() - {factor}
    beside = row["beside"].removeprefix(f"{other}=")
    settings = [beside] if beside else [one for one in FACTORS[other] if one != "tied"]
    seeds = RECORD.seeds if beside else (0, 2, 4)
    return {
        seed: mean(
            values({factor: level, other: setting}, "loss_served")[seed]
            - values({factor: FACTORS[factor][0], other: setting}, "loss_served")[seed]
            for setting in settings
        )
        for seed in seeds
    }


def test_effects_are_in_their_unit_and_whole(tables, study):
    assert [(row["level"], row["beside"]) for row in tables["effects"]] == [
        ("mqa", ""), ("trained", ""), ("tied", "heads=mha"), ("tied", "heads=mqa")
    ], "a level of serving is judged beside each setting"  # fmt: skip
    for row, effect in zip(tables["effects"], study.effects("loss_served"), strict=True):
        by_seed = differences_by_seed(row)
        value = mean(by_seed.values())
        near(row["difference (nats/token)"], value)
        for seed in RECORD.seeds:
            text = row[f"difference at seed {seed} (nats/token)"]
            near(text, by_seed[seed]) if seed in by_seed else near(text or 0, 0)
        own = stats.ttest_1samp(list(by_seed.values()), 0.0)
        near(row["p"], own.pvalue)
        near(row["95% CI low (nats/token)"], own.confidence_interval(0.95).low)
        near(row["95% CI high (nats/token)"], own.confidence_interval(0.95).high)
        ends = [float(row[f"simultaneous 95% {end} (nats/token)"]) for end in ("low", "high")]
        if 0.0 not in ends:  # cut at zero by Holm's steps
            near(mean(ends), value)
        near(row["p (corrected)"], effect.corrected_p)
        if not row["beside"]:
            settings = [value for _, value in effect.by_setting]
            near(row["over settings low (nats/token)"], min(settings))
            near(row["over settings high (nats/token)"], max(settings))
        parts = [
            r
            for r in tables["effects"]
            if (r["factor"], r["level"]) == (row["factor"], row["level"])
        ]
        near(row["mean over all settings (nats/token)"],
             mean(float(one["difference (nats/token)"]) for one in parts))  # fmt: skip
        assert int(row["pairs used"]) == len(by_seed) * (1 if row["beside"] else 2)
        assert int(row["pairs used"]) <= int(row["pairs designed"])
        assert (int(row["groups"]), int(row["seeds"])) == (effect.groups, len(by_seed))
        smaller = {"mqa": 4, "trained": 2, "tied": 2}[row["level"]]
        near(row["KV smaller least"], smaller)
        near(row["KV smaller most"], smaller)
        if row["detectable (nats/token)"]:
            near(row["detectable (nats/token)"], effect.detectable)
    for row in tables["interactions"]:
        ends = [row[f"simultaneous 99% {end} (nats/token)"] for end in ("low", "high")]
        assert all(ends), "tested at a fifth of the error"
        if 0.0 not in map(float, ends):
            near(row["beyond the sum (nats/token)"], mean(map(float, ends)))
            assert float(ends[0]) < float(ends[1])
        assert int(row["groups"]) * int(row["seeds"]) >= 2
        assert not row["p (corrected)"] or 0 <= float(row["p (corrected)"]) <= 1


def test_widths_of_intervals_are_in_their_unit(tables, study):
    found = {effect.name: effect for effect in study.effects("loss_served")}
    for row in tables["interval-widths"]:
        effect = found[row["level"]]
        near(row["error over seeds (nats/token)"], effect.tested_error.value)
        now = float(row["half interval (nats/token)"])
        assert now >= (effect.high - effect.low) / 2 * (1 - 1e-9)  # it may be cut at zero
        assert float(row["twice the seeds (nats/token)"]) < now
        assert (
            now / 2**0.5 * (1 - 1e-9) <= float(row["twice the scored tokens (nats/token)"]) <= now
        )
        assert float(row["error over texts (nats/token)"]) > 0


def test_effects_on_other_measurements_say_their_unit(tables, study):
    from kvlab.report.formatting import short_title

    named = {short_title(metric): metric for metric in reversed(METRICS)}
    units = set()
    for row in tables["effects-other"]:
        metric, unit = named[row["measurement"]], row["unit"]
        effect = next(
            e for e in study.effects(metric) if e.name == f"{row['factor']}={row['level']}"
        )
        factor = 100 if metric.startswith(("hellaswag", "serving_top")) else 1
        assert unit == ("points" if factor == 100 else METRICS[metric].unit)
        units.add(unit)
        near(row["difference"], factor * effect.estimate.value)
        if row["simultaneous 95% low"]:
            ends = [float(row[f"simultaneous 95% {end}"]) for end in ("low", "high")]
            # of found effects the interval ends at zero: it is not symmetric
            assert ends[0] < factor * effect.estimate.value < ends[1]
        assert int(row["pairs"]) == effect.pairs_used
    assert {"points", "nats/token", "bits/byte"} <= units
    assert not {"ms", "tokens/s", "times"} & units, "some trials were timed beside others"


def test_budgets_and_cells_are_bytes(tables):
    per_context = 1024 / load_served_model("gpt2", {}).model.block_size
    for row in tables["equal-memory"]:
        best = levels_of(row["best cell"])
        taken = RECORD.bytes(best) * per_context
        near(row["its K/V cache (bytes)"], taken)
        assert taken <= float(row["budget per 1,024 tokens (bytes)"]) < RECORD.bytes(BASE)
        near(row["served loss (nats/token)"], ranked(best, "loss_served"))
        near(row["against baseline (nats/token)"], against(best, BASE, "loss_served")[0])
        assert int(row["cells that fit"]) > row["may be best instead"].count(";")
        bound = row["worse than the best by at most (nats/token)"]
        assert int(row["cells that fit"]) > 1
        assert float(bound) >= 0
    for row in tables["fronts"]:
        assert int(row["fronts"]) == sum(
            text in ("on the front", "perhaps") for text in row.values()
        )


def test_intervals_of_cells_hold_together(tables):
    """They contain the difference, and are wider than that of one paired t-test would be."""
    low, high = (f"simultaneous 95% {end} (nats/token)" for end in ("low", "high"))
    found = 0
    for name in ("cells", "pareto", "equal-memory"):
        for row in tables[name]:
            levels = {f: row[f] for f in FACTORS} if name == "cells" else levels_of(
                row["cell" if name == "pareto" else "best cell"])  # fmt: skip
            value, *interval = against(levels, BASE, "loss_served")
            if row[low]:
                near((float(row[low]) + float(row[high])) / 2, value)
                assert float(row[low]) < interval[0] < interval[1] < float(row[high])
                found += 1
    assert found > 5


def test_accuracies_are_percent_and_their_differences_points(tables):
    metrics = {"acc": "acc", "acc_norm": "acc_norm", "acc_norm served": "acc_norm_served",
               "lm-eval acc_norm": "lmeval_acc_norm",
               "lm-eval acc_norm served": "lmeval_acc_norm_served"}  # fmt: skip
    for row in tables["hellaswag"]:
        assert len(row) == 1 + 2 * len(metrics)
        for head, metric in metrics.items():
            share = average(levels_of(row["cell"]), f"hellaswag_{metric}")
            near(row[f"{head} (%)"], 100 * share)
            error = 100 * (share * (1 - share) / (ITEMS - 1)) ** 0.5
            near(row[f"{head} error over items (points)"], error)
    for name, metric in (("one-shot", "acc_norm"), ("cache", "acc_norm_served")):
        for row in tables[f"hellaswag-{name}"]:
            difference = against(levels_of(row["cell"]), BASE, f"hellaswag_{metric}")[0]
            near(row["difference (points)"], 100 * difference)
            low, high = (float(row[f"simultaneous 95% {end} (points)"]) for end in ("low", "high"))
            assert low <= 100 * difference <= high
            assert (row["these weights"] == "within noise") == (low <= 0 <= high)
            net = int(row["gained"]) - int(row["lost"])
            seeds = len(values(levels_of(row["cell"]), "loss"))
            near(100 * net / ITEMS / seeds, 100 * difference)
            assert 0 <= float(row["p"]) <= float(row["p (all cells)"]) <= 1


def test_needles_are_nats_and_percent_by_depth(tables):
    for name, metric, unit in (
        ("needle", "loss", "nats/token"),
        ("needle-accuracy", "accuracy", "%"),
    ):
        scored = set()
        for row in tables[name]:
            levels, way = levels_of(row["cell"]), row["scored"]
            scored.add(way)
            kind = {"one-shot": metric, "served": f"{metric}_served"}.get(way, "loss_change")
            for depth in NEEDLE_DEPTHS:
                seeds = values(levels, "loss")
                lines = [needle_line(int(row["length"]), depth, levels, seed) for seed in seeds]
                seen = [(100 if unit == "%" else 1) * line[kind] for line in lines]
                near(row[f"depth {100 * depth:.0f}% ({unit})"], mean(seen))
                near(row[f"depth {100 * depth:.0f}% error ({unit})"], stdev(seen))
        assert scored == {"one-shot", "served"} | (
            {"served minus one-shot"} if unit != "%" else set()
        )


def test_provenance_counts_trials(tables):
    assert {int(row["trials"]) for row in tables["provenance"]} == {
        len(RECORD.cells()) * len(RECORD.seeds)
    }


def test_a_cells_numbers_fill_its_columns():
    columns = (Column("a (ms)", True, csv=("a (ms)", "a sd (ms)")), Column("b", True))
    rows = (Row((Cell("1 ± 2", 1.0, csv=(1.0, None)), cell("3", 3))), Row((EMPTY_CELL, EMPTY_CELL)))
    assert table_to_csv(Table("made", "Made.", columns, rows)) == "a (ms),a sd (ms),b\n1.0,,3\n,,\n"
    with pytest.raises(AssertionError, match="a"):
        table_to_csv(Table("made", "Made.", columns, (Row((Cell("1", 1), EMPTY_CELL)),)))


def test_two_reports_of_one_sweep_are_compared_by_their_losses(tmp_path):
    from tests.compare_results import compare_results

    for name, loss in (("new", "2.5"), ("old", "2.75"), ("other", "")):
        (tmp_path / name).mkdir()
        rows = f"trial,measured.loss_served\na,2.0\nb,{loss}\n".replace(
            "a,2.0\n", "" if not loss else "a,2.0\n"
        )
        (tmp_path / name / "results.csv").write_text(rows)
    said = compare_results(tmp_path / "new", tmp_path / "old")
    assert said.startswith("2 of 2 trials are those of")
    assert "differ by at most 0.25 nats/token" in said
    assert "are equal" in compare_results(tmp_path / "new", tmp_path / "new")
    assert "has other trials than" in compare_results(tmp_path / "new", tmp_path / "other")
