"""Numbers of a full report's CSVs, by what their heads say, straight from the record.

Those of effects, cells and gaps are computed again in `test_recomputed_effects`.
"""

import math
from statistics import mean, stdev

import pytest
from scipy import stats

from kvlab.report.report_files import make_document
from kvlab.report.sections import SECTIONS
from kvlab.spec import load_served_model
from tests.report.full_record import (
    BASE,
    FACTORS,
    ITEMS,
    NEEDLE_DEPTHS,
    RECORD,
    against,
    average,
    levels_of,
    needle_line,
    values,
)
from tests.report.reading import load, rows


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return load(RECORD, tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def tables(study):
    """Name -> rows, each a mapping of heads to texts."""
    document = make_document(study)
    elsewhere = {"size-trends", "tuned", "matched", "divergence", "lm-eval"}  # own records
    assert document.sections.keys() == SECTIONS.keys() - elsewhere, "nothing to check"
    return {table.name: rows(document, table.name) for table in document.tables}


def near(text, expected):
    assert float(text) == pytest.approx(expected, rel=1e-9, abs=1e-12)


# Heads without their unit -> a metric and a factor: the cell's mean over seeds, beside its spread.
MEANS = {
    ("kv-dtype", "loss change"): ("kv_dtype_loss_change", 1),
    ("serving-top-positions", "8/8"): ("serving_top_changed_part8", 100),
    ("reuse", "hit rate"): ("reuse_hit_rate", 100),
    ("reuse", "warm"): ("reuse_warm_ttft_ms", 1),
    ("reuse", "reuse gap"): ("reuse_gap", 1),
    ("quantized-training", "peak memory"): ("training_peak_bytes", 2**-20),
    ("speed", "per token p95"): ("tpot_ms_p95", 1),
    ("speed", "per token, no cache"): ("tpot_ms_uncached_p50", 1),
    ("speed", "tokens/s, largest batch"): ("tokens_per_second", 1),
    ("recall", "far"): ("recall_acc_far", 100),
    ("positions", "beyond"): ("loss_beyond", 1),
}


def difference(levels):
    return against(levels, BASE, "loss_served")[0]


def smaller(levels):
    return RECORD.bytes(BASE) / RECORD.bytes(levels)


# Others that are a number of the row's cell.
CELLS = {
    ("ablation", "served loss"): lambda c: average(c, "loss_served"),
    ("ablation", "against baseline"): difference,
    ("ablation", "K/V cache"): RECORD.bytes,
    ("ablation", "smaller"): smaller,
    ("ablation", "change in parameters"): lambda c: -0.03 * ("mqa" in c.values()),
    ("ablation", "serving gap"): lambda c: average(c, "serving_gap"),
    ("cells", "perplexity"): lambda c: math.exp(average(c, "loss_served")),
    ("serving-gap", "smallest gap"): lambda c: min(values(c, "serving_gap").values()),
    ("serving-gap", "largest gap"): lambda c: max(values(c, "serving_gap").values()),
    ("kv-dtype", "logit error, rms"): lambda c: average(c, "kv_dtype_logit_rms"),
    ("kv-dtype", "logit error, largest"): lambda c: average(c, "kv_dtype_logit_largest"),
    ("eviction", "dropped"): lambda c: 100 * average(c, "evicted_share"),
    ("memory", "storages most"): RECORD.bytes,
    ("memory", "read per token"): lambda c: average(c, "kv_bytes_read"),
    ("memory", "peak with cache"): lambda c: average(c, "peak_bytes_cached"),
    ("memory", "activations"): lambda c: max(values(c, "peak_bytes_activations").values()),
    ("speed", "disturbed"): lambda c: int(0 in values(c, "loss")),
    ("roofline", "measured"): lambda c: mean(
        1000 * RECORD.seconds(c, seed) for seed in values(c, "loss")
    ),
    ("reuse", "warm/cold sd"): lambda c: stdev((2 + s) / (8 + s) for s in values(c, "loss")),
    ("reuse-budgets", "a conversation"): lambda c: average(c, "reuse_conversation_bytes"),
    ("reuse-budgets", "hit rate in 4,000,000 B"): lambda c: 100 * average(c, "reuse_hit_rate") + 10,
}


@pytest.mark.parametrize(("table", "head"), [*MEANS, *CELLS])
def test_a_number_of_a_cell_is_what_its_head_says(tables, table, head):
    checked = 0
    for row in tables[table]:
        levels = {f: row[f] for f in FACTORS} if table == "cells" else levels_of(row["cell"])
        plain = {title.partition(" (")[0]: text for title, text in row.items()}
        if levels == BASE and head == "against baseline":
            assert plain[head] == ""
        elif (table, head) in CELLS:
            near(plain[head], CELLS[table, head](levels))
            checked += 1
        else:
            metric, factor = MEANS[table, head]
            ending = "_served" if row.get("scored") == "served" else ""
            seen = [factor * v for v in values(levels, metric + ending).values()]
            near(plain[head], mean(seen))
            near(plain[f"{head} sd"] or 0.0, stdev(seen))
            checked += 1
    assert checked


def differences_by_seed(row):
    """A level minus its factor's baseline by seed, straight from the record.

    Cells that are served otherwise than they were trained enter no mean over settings. mqa+trained
    misses the seeds 1 and 3, so means over both settings are over the others.
    """
    factor, level = row["factor"], row["level"]
    (other,) = FACTORS.keys() - {factor}
    beside = row["beside"].removeprefix(f"{other}=")
    settings = [beside] if beside else [one for one in FACTORS[other] if one != "tied"]
    return {
        seed: mean(
            values({factor: level, other: setting}, "loss_served")[seed]
            - values({factor: FACTORS[factor][0], other: setting}, "loss_served")[seed]
            for setting in settings
        )
        for seed in (RECORD.seeds if beside else (0, 2, 4))
    }


def test_effects_where_trials_are_missing(tables, study):
    """Those of whole records are computed again in `test_recomputed_effects`."""
    assert [(row["level"], row["beside"]) for row in tables["effects"]] == [
        ("mqa", ""), ("trained", ""), ("tied", "heads=mha"), ("tied", "heads=mqa")
    ], "a level of serving is judged beside each setting"  # fmt: skip
    for row, effect in zip(tables["effects"], study.effects("loss_served"), strict=True):
        by_seed = differences_by_seed(row)
        near(row["difference (nats/token)"], mean(by_seed.values()))
        for seed, value in by_seed.items():
            near(row[f"difference at seed {seed} (nats/token)"], value)
        own = stats.ttest_1samp(list(by_seed.values()), 0.0)
        near(row["p"], own.pvalue)
        near(row["95% CI low (nats/token)"], own.confidence_interval(0.95).low)
        near(row["95% CI high (nats/token)"], own.confidence_interval(0.95).high)
        assert int(row["pairs used"]) == len(by_seed) * (1 if row["beside"] else 2)
        assert int(row["pairs used"]) <= int(row["pairs designed"])
        assert (int(row["groups"]), int(row["seeds"])) == (effect.groups, len(by_seed))
        near(row["KV smaller most"], {"mqa": 4, "trained": 2, "tied": 2}[row["level"]])
        if row["detectable (nats/token)"]:
            near(row["detectable (nats/token)"], effect.detectable)


def test_budgets(tables):
    per_context = 1024 / load_served_model("gpt2", {}).model.block_size
    for row in tables["equal-memory"]:
        best = levels_of(row["best cell"])
        taken = RECORD.bytes(best) * per_context
        near(row["its K/V cache (bytes)"], taken)
        assert taken <= float(row["budget per 1,024 tokens (bytes)"]) < RECORD.bytes(BASE)
        near(row["served loss (nats/token)"], average(BASE, "loss_served") + difference(best))
        assert int(row["cells that fit"]) > max(1, row["may be best instead"].count(";"))
        assert float(row["worse than the best by at most (nats/token)"]) >= 0


def test_accuracies_are_percent_and_their_differences_points(tables):
    for row in tables["hellaswag"]:
        for head, metric in (("acc", "acc"), ("acc_norm served", "acc_norm_served"),
                             ("lm-eval acc_norm", "lmeval_acc_norm")):  # fmt: skip
            share = average(levels_of(row["cell"]), f"hellaswag_{metric}")
            near(row[f"{head} (%)"], 100 * share)
            error = 100 * (share * (1 - share) / (ITEMS - 1)) ** 0.5
            near(row[f"{head} error over items (points)"], error)
    for name, metric in (("one-shot", "acc_norm"), ("cache", "acc_norm_served")):
        for row in tables[f"hellaswag-{name}"]:
            levels = levels_of(row["cell"])
            points = 100 * against(levels, BASE, f"hellaswag_{metric}")[0]
            near(row["difference (points)"], points)
            low, high = (float(row[f"simultaneous 95% {end} (points)"]) for end in ("low", "high"))
            assert low <= points <= high
            assert (row["these weights"] == "within noise") == (low <= 0 <= high)
            net = int(row["gained"]) - int(row["lost"])
            near(100 * net / ITEMS / len(values(levels, "loss")), points)
            assert 0 <= float(row["p"]) <= float(row["p (all cells)"]) <= 1


@pytest.mark.parametrize(
    ("name", "metric", "unit", "factor"),
    [("needle", "loss", "nats/token", 1), ("needle-accuracy", "accuracy", "%", 100)],
)
def test_needles_by_depth(tables, name, metric, unit, factor):
    for row in tables[name]:
        levels, way = levels_of(row["cell"]), row["scored"]
        kind = {"one-shot": metric, "served": f"{metric}_served"}.get(way, "loss_change")
        for depth in NEEDLE_DEPTHS:
            seen = [
                factor * needle_line(int(row["length"]), depth, levels, seed)[kind]
                for seed in values(levels, "loss")
            ]
            near(row[f"depth {100 * depth:.0f}% ({unit})"], mean(seen))
            near(row[f"depth {100 * depth:.0f}% error ({unit})"], stdev(seen))
    assert {row["scored"] for row in tables[name]} >= {"one-shot", "served"}
