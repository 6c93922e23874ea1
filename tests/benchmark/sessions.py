"""A benchmark session of two small variants on CPU, with made-up peaks."""

from kvlab.benchmark.measurement import StopRule
from kvlab.benchmark.session import BenchmarkSettings, Session, Variant
from kvlab.layout.roofline_model import DevicePeaks
from kvlab.model import GPT
from kvlab.spec import ModelConfig, ServingConfig

SHAPE = {"vocab_size": 257, "block_size": 512, "n_layer": 2, "n_head": 2, "n_embd": 16}
PEAKS = DevicePeaks("made", "float32", 1, bandwidth=1e9, flops=1e10)
DEFAULTS = {
    "prompt_tokens": 8,
    "new_tokens": 4,
    "contexts": (8,),
    "batches": (1, 2),
    "stop_rule": StopRule(min_rounds=2, max_rounds=2),
}


def make_session(**settings):
    """The session, and the list that its notices go to."""
    wide = GPT(ModelConfig(**SHAPE)).eval()
    narrow = GPT(ModelConfig(**SHAPE, n_kv_head=1)).eval()
    notices = []
    session = Session(
        [
            Variant("wide", wide, ServingConfig(), "bytes"),
            Variant("narrow", narrow, ServingConfig(tie="adjacent:2"), "bytes"),
        ],
        BenchmarkSettings(**DEFAULTS | settings),
        on_notice=notices.append,
        device_peaks={"float32": PEAKS},
    )
    return session, notices


def lines_by_metric(lines, variant, **fields):
    """The lines of one variant whose fields have these values, by metric."""
    return {
        line.metric: line
        for line in lines
        if line.variant == variant
        and all(getattr(line, name) == value for name, value in fields.items())
    }
