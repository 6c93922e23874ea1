"""Records of searches, as a driver leaves them, without training."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlab.store import Store
from tests.support.record_factory import Record

Suggestion = dict[str, Any]


def suggest(settings: dict[str, Any], state: str = "ok", **facts: Any) -> Suggestion:
    """Return one suggestion; ``facts`` replace what follows from its state."""
    unknown = {"values": [], "rungs": [], "violations": {}, "reason": ""}
    return {"settings": settings, "state": state, **unknown, **facts}


@dataclass
class SearchRecord(Record):
    """A search over ``model.n_kv_head`` and ``training.learning_rate``.

    Attributes:
        suggestions: From `suggest`; one with a reason has no trial.
        search: Replaces keys of the search's configuration.
    """

    suggestions: list[Suggestion] = field(default_factory=list)
    search: dict[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)

    def write(self, store: Path, order: int | None = None) -> Store:
        levels = [f"p{number:04d}" for number, _ in enumerate(self.suggestions, 1)]
        self.factors = {"point": ("base", *levels)}
        by_level = dict(zip(levels, self.suggestions, strict=True))
        trained = {level for level, one in by_level.items() if not one["reason"]}
        self._by_level = by_level
        self.exclude = lambda cell: cell["point"] not in {"base", *trained}
        self.status = lambda cell, _: self._status(cell["point"])
        target = super().write(store, order)
        description = target.sweep(self.name)
        description["patches"] = {
            "point": {"base": {}} | {level: one["settings"] for level, one in by_level.items()}
        }
        trials = {level: self.trial({"point": level}, 0) for level in trained}
        suggestions = [
            {**one, "level": level, "trial": trials.get(level, "")}
            for level, one in by_level.items()
        ]
        description["search"] = {
            **self._configuration(), "suggestions": suggestions, **self.search,
        }  # fmt: skip
        target.write_sweep({key: v for key, v in description.items() if key != "schema"})
        return target

    def _status(self, level: str) -> str:
        if level == "base":
            return "done"
        one, statuses = self._by_level[level], {"lost": "failed", "open": "missing"}
        if "diverged" in one["violations"]:
            return "diverged"
        return "done" if one["values"] else statuses.get(one["state"], one["state"])

    def loss(self, levels, seed):  # noqa: ARG002
        values = self._by_level[levels["point"]]["values"] if levels["point"] != "base" else []
        return values[0] if values else 3.6

    def bytes(self, levels):
        if levels["point"] == "base":
            return 4 * 2**20
        one = self._by_level[levels["point"]]
        heads = one["settings"]["model.n_kv_head"]
        return int(one["values"][1]) if len(one["values"]) > 1 else 2**20 * heads

    def result(self, levels, seed, status):
        found = super().result(levels, seed, status)
        found["experiment"]["training"]["batch_tokens"] = 4096
        if "loss_served" in found["measurements"]:
            found["measurements"]["loss_served"] = found["measurements"]["loss"]
        if status == "pruned":
            found["pruned"] = {"step": 38, "steps": 150, "loss": 4.1}
        return found

    def _configuration(self) -> dict[str, Any]:
        objectives = self.search.get("objectives", ["loss_served"])
        rates = {"low": 1e-4, "high": 1e-1, "log": True, "whole": False, "step": None}
        return {
            "choices": {"model.n_kv_head": [1, 2, 4]}, "ranges": {"training.learning_rate": rates},
            "objectives": objectives, "directions": ["minimize"] * len(objectives), "limits": {},
            "sampler": "tpe", "seed": 0, "parallel": 2, "pruning": None, "trials": 8,
            "flops": None, "hours": None, "stop_reason": "8 trials are the budget",
            "spent_flops": 1e9, "spent_seconds": 60.0, "importances": {},
        }  # fmt: skip


def settings(heads: int, rate: float) -> dict[str, Any]:
    return {"model.n_kv_head": heads, "training.learning_rate": rate}


EVERY_OUTCOME = SearchRecord(
    suggestions=[
        suggest(settings(2, 1e-3), values=[3.5], violations={"kv_bytes +1": -0.33}),
        suggest(settings(2, 2e-3), values=[3.2], violations={"kv_bytes +1": -0.33}),
        suggest(settings(1, 5e-2), "beyond", violations={"diverged": 1.0}),
        suggest(settings(3, 1e-3), "beyond", reason="is not possible: 3 does not divide 4"),
        suggest(settings(4, 3e-3), "beyond", violations={"kv_bytes +1": 0.33},
                reason="is beyond a limit"),
        suggest(settings(2, 2e-3), values=[3.2], reason="computes the same as p0002"),
        suggest(settings(1, 1e-3), "lost"),
        suggest(settings(1, 2e-3), "pruned", rungs=[4.1]),
        suggest(settings(4, 2e-3), "beyond", values=[3.1], violations={"kv_bytes +1": 0.33}),
        suggest(settings(1, 3e-3), values=[3.3], violations={"kv_bytes +1": -0.67}),
    ],
    search={
        "limits": {"kv_bytes": {"at_most": 3 * 2**20, "at_least": None}},
        "pruning": {"rule": "halving", "factor": 2, "rungs": [0.25, 0.5], "startup": None},
        "importances": {
            "loss_served": {"training.learning_rate": 0.75, "model.n_kv_head": 0.25}
        },
    },
)  # fmt: skip


def two_objectives(**search: Any) -> SearchRecord:
    """Return a finished search for loss and bytes; trials 1, 3 and 4 are its front."""
    values = [(3.0, 4096.0), (3.4, 4096.0), (3.1, 2048.0), (3.3, 1024.0), (3.3, 2048.0)]
    suggestions = [
        suggest(settings(heads, 1e-3 * number), values=list(pair))
        for number, (heads, pair) in enumerate(zip((4, 4, 2, 1, 2), values, strict=True), 1)
    ]
    return SearchRecord(
        suggestions=suggestions, search={"objectives": ["loss_served", "kv_bytes"], **search}
    )
