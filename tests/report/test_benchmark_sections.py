"""Curves and roofline: shown only where the record has them, and right."""

import pytest

from kvlab.layout.roofline_model import DevicePeaks, decode_step_cost
from kvlab.report.benchmark_plots import benchmark_figures, roofline_figure
from kvlab.report.sections.speed import report_roofline
from kvlab.spec import ServingConfig, load_served_model
from tests.report.reading import load, tables
from tests.support.record_factory import Record

FACTORS = {"heads": ("mha", "mqa"), "sharing": ("none", "trained")}


def line(part, metric, value, **more):
    return {
        "part": part, "metric": metric, "variant": "made", "value": value, "device": "made",
        "dtype": "float32", **more,
    }  # fmt: skip


def lines(seconds):
    for prompt in (64, 128):
        place = {"batch_size": 1, "prompt_tokens": prompt}
        yield line("latency", "ttft", 2 * prompt * seconds, **place, cached=True)
        for cached in (True, False):
            value = seconds * (1 if cached else prompt)
            kernel = "flash_attention" if cached else "cpu_tiled; flash_attention"
            yield line("latency", "tpot", value, **place, context_length=prompt, cached=cached,
                       attention=kernel)  # fmt: skip
    yield line("throughput", "tokens_per_second", 1 / seconds, batch_size=1, cached=True)
    yield line("throughput", "tokens_per_second", 3 / seconds, batch_size=4, cached=True)
    yield line("roofline", "bandwidth", 1e9, note="measured on made, float32")
    slow = "measured on made, float32; 60% of the bandwidth: products are slow"
    yield line("roofline", "product_bandwidth", 6e8, note=slow)
    yield line("roofline", "matrix_rate", 1e11)
    place = {"batch_size": 1, "context_length": 64, "cached": True}
    for metric, value in {
        "step_flops": 10**7, "step_weight_bytes": 10**6, "step_kv_read_bytes": 10**5,
        "step_measured": seconds, "efficiency": 5e-4 / seconds, "mbu": 0.4, "mfu": 0.1,
    }.items():  # fmt: skip
        yield line("roofline", metric, value, **place)
    yield line("roofline", "step_predicted", 5e-4, **place, verdict="memory")


class Measured(Record):
    """A record whose trials measured curves and the roofline; MQA is twice as fast."""

    def result(self, levels, seed, status):
        result = super().result(levels, seed, status)
        seconds = (1e-3 if levels["heads"] == "mha" else 5e-4) * (1 + 0.1 * seed)
        result["benchmark"] = list(lines(seconds))
        is_mqa = levels["heads"] == "mqa"
        shape = load_served_model("gpt2", {"model.n_kv_head": 1} if is_mqa else {})
        result["experiment"] |= {
            "model": shape.model.model_dump(mode="json"),
            "serving": ServingConfig().model_dump(mode="json"),
            "data": {"source": "docstrings", "tokenizer": "gpt2", "paths": []},
            "training": {"tokens": 0, "batch_tokens": 1024},
        }
        return result


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return load(Measured(factors=FACTORS, seeds=(0, 1)), tmp_path_factory.mktemp("store"))


def table(section, name):
    found = tables(section)[name]
    heads = [column.title for column in found.columns]
    return [dict(zip(heads, (cell.value for cell in row.cells), strict=True)) for row in found.rows]


def test_the_roofline_says_from_where_on_a_layout_pays(study):
    """MQA reads a twelfth of the K/V; its K and V weights are a twelfth, too, and save nearly a
    tenth of all bytes at any context: found by hand at the two neighbours of each limit."""
    rows = {row["cell"]: row for row in table(report_roofline(study), "break-even")}
    assert set(rows) == {"trained", "mqa"}
    never = rows["trained"]  # the same layout as the baseline's, in this record
    assert never["context at batch 1 (tokens)"] == 2**20 + 1
    mqa, mha = load_served_model("gpt2", {"model.n_kv_head": 1}), load_served_model("gpt2")
    device = DevicePeaks("made", "float32", 0, 1e9, 1e11)

    def share(batch, context):
        mine, base = (
            decode_step_cost(x.model, ServingConfig(), batch, context, "float32")
            for x in (mqa, mha)
        )
        return mine.seconds(device) / base.seconds(device)

    context = rows["mqa"]["context at batch 1 (tokens)"]
    assert share(1, context) <= 0.9
    assert context == 1 or share(1, context - 1) > 0.9
    batch = rows["mqa"]["batch at the block size (sequences)"]
    assert share(batch, 1024) <= 0.9
    assert batch == 1 or share(batch - 1, 1024) > 0.9


def test_one_place_makes_no_curve():
    alone = [line("latency", "ttft", 1.0, prompt_tokens=8, cached=True)]
    assert list(benchmark_figures(alone)) == []
    assert roofline_figure(alone, {}) is None
