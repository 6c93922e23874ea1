"""What extensions add to the methods of a paper."""

from pathlib import Path

from kvlab.extensions.paper.paper import write_methods
from tests.extensions.paper.test_paper_files import FullRecord, assert_balanced
from tests.report.reading import load
from tests.support.golden import check_golden

GOLDEN = Path(__file__).with_name("methods.tex")
KV = {"mha": {"latent": 8, "groups": 1}, "mqa": {"latent": 8, "groups": 2}, "gqa": "grouped_tied",
      "tied": "tied", "rotated": "rotated_tied"}  # fmt: skip
EVICT = {"mha": "recency", "mqa": "heavy_hitters", "gqa": "snapkv"}


class ExtendedRecord(FullRecord):
    """Experiments and measurements of all extensions that have a term."""

    def result(self, levels, seed, status):
        found, heads = super().result(levels, seed, status), levels["heads"]
        found["experiment"]["model"]["kv"] = KV[heads]
        evict = {"keep": 8, "by": EVICT[heads]} if heads in EVICT else None
        serving = {"kv_dtype": "kivi2", "kv_rotate": "hadamard", "evict": evict}
        found["experiment"]["serving"] |= serving
        found["experiment"]["training"]["int8"] = ["output"]
        return found

    def measurements(self, levels, seed):
        more = {"recall": 0.5, "needle_loss": 1.0, "lm_eval_piqa_acc": 0.5}
        return super().measurements(levels, seed) | more


def test_methods_of_extensions_are_named_and_cited(tmp_path):
    text = write_methods(load(ExtendedRecord(factors={"heads": tuple(KV)}), tmp_path))
    assert_balanced(text)
    check_golden(GOLDEN, text)
