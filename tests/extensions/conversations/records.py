"""A made record of trials that served conversations."""

from tests.report.full_record import FullRecord

BUDGETS = (10**6, 4 * 10**6)


def reuse(levels, seed):
    """MQA finds more in the same bytes; a tie changes replies."""
    is_small, is_tied = levels["heads"] == "mqa", levels["sharing"] == "tied"
    return {
        "reuse_hit_rate": 0.6 if is_small else 0.3, "reuse_hit_rate_exact": 0.75,
        "reuse_flops_saved": 0.55 if is_small else 0.25, "reuse_requests": 120,
        "reuse_warm_ttft_ms": 2.0 + seed, "reuse_cold_ttft_ms": 8.0 + seed,
        "reuse_conversation_bytes": 5 * 10**4 if is_small else 2 * 10**5,
        "reuse_gap": 0.02 + 0.001 * seed if is_tied else 0.0,
        "reuse_kl": 0.01 * 2**seed if is_tied else 0.0,
    }  # fmt: skip


def reuse_lines(levels, seed):
    found = reuse(levels, seed)
    of = {"part": "conversations", "variant": "made", "exact": True}
    for n, budget in enumerate(BUDGETS):
        rate = found["reuse_hit_rate"] + 0.1 * n
        fit = budget // found["reuse_conversation_bytes"]
        yield {**of, "metric": "budget_hit_rate", "value": rate, "budget_bytes": budget}
        yield {**of, "metric": "budget_conversations", "value": fit, "budget_bytes": budget}
    for turn in (1, 2, 3):
        rate = (turn - 1) / 4
        yield {**of, "metric": "turn_hit_rate", "value": rate, "turn": turn}
        yield {**of, "metric": "turn_hit_rate_exact", "value": rate + 0.1, "turn": turn}


class ReuseRecord(FullRecord):
    """A full record whose benchmark served conversations, too."""

    def measurements(self, levels, seed):
        return super().measurements(levels, seed) | reuse(levels, seed)

    def result(self, levels, seed, status):
        result = super().result(levels, seed, status)
        config = {"budget": BUDGETS[0], "snapshot_tokens": 64}
        result["experiment"]["benchmark"] = {"conversations": config}
        if status == "done":
            result["benchmark"] += reuse_lines(levels, seed)
        return result


RECORD = ReuseRecord()
