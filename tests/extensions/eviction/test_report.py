"""What the report says of eviction, beside the serving gap."""

from kvlab.report.sections import SECTIONS
from kvlab.spec import ServingConfig
from tests.report.full_record import FullRecord
from tests.report.reading import load, rows


class EvictingRecord(FullRecord):
    """A full record whose cells kept some tokens."""

    def measurements(self, levels, seed):
        return super().measurements(levels, seed) | {"evicted_share": 0.25}

    def result(self, levels, seed, status):
        result = super().result(levels, seed, status)
        serving = ServingConfig(evict={"keep": 10**9, "by": "recency", "sinks": 2})
        result["experiment"]["serving"] = serving.model_dump(mode="json")
        return result


def test_a_table_says_what_cells_keep_and_drop(tmp_path):
    section = SECTIONS["serving-gap"].make(load(EvictingRecord(), tmp_path))
    found = rows(section, "eviction")
    assert len(found) == 6
    for row in found:
        assert row["keeps"] == "1,000,000,000 tokens by recency, sinks 2"
        assert float(row["dropped (%)"]) == 25.0
