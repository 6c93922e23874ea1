"""Synthetic records with known effects, as a driver and its workers would leave them."""

import hashlib
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from kvlab.store import Store

Levels = Mapping[str, str]

FACTORS = {
    "heads": ("mha", "mqa"),
    "position": ("learned", "rope"),
    "horizon": ("global", "hybrid"),
    "sharing": ("none", "trained", "tied"),
}
EFFECTS = {"mqa": 0.10, "rope": -0.05, "hybrid": 0.02, "trained": 0.08}
TIED_GAP = 1.5
SERVING_ONLY = frozenset({"tied"})
"""Levels that share the training of their factor's baseline level."""

_KV = {"mqa": 4, "hybrid": 3, "trained": 2, "tied": 2}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class Record:
    """A sweep that `write` puts into a store.

    ``effects`` are added to the loss where a level is present; ``noise`` is the standard
    deviation of one training's loss, ``seed_noise`` of what all cells share at a seed.
    """

    name: str = "made"
    factors: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: dict(FACTORS))
    seeds: tuple[int, ...] = (0, 1, 2)
    effects: Mapping[str, float] = field(default_factory=lambda: dict(EFFECTS))
    noise: float = 0.005
    seed_noise: float = 0.05
    items: int = 0
    points: int = 5
    exclude: Callable[[Levels], bool] = lambda _levels: False
    status: Callable[[Levels, int], str] = lambda _levels, _seed: "done"
    error: str = "the loss became nan"
    question: str = "What does each reduction cost?"
    design: str = "full"
    notes: tuple[str, ...] = ()
    change: Callable[[dict[str, Any], Levels, int], object] = lambda _result, _levels, _seed: None
    """Alters what a trial records."""

    def cells(self) -> list[dict[str, str]]:
        combinations = (
            dict(zip(self.factors, levels, strict=True))
            for levels in product(*self.factors.values())
        )
        return [levels for levels in combinations if not self.exclude(levels)]

    def trial(self, levels: Levels, seed: int) -> str:
        return digest(f"trial {self.name} {sorted(levels.items())} {seed}")

    def training(self, levels: Levels, seed: int) -> str:
        trained = {
            factor: self.factors[factor][0] if level in SERVING_ONLY else level
            for factor, level in levels.items()
        }
        return digest(f"training {self.name} {sorted(trained.items())} {seed}")

    def write(self, store: Path, order: int | None = None) -> Store:
        """Write the record; ``order`` seeds a shuffle of cells and results."""
        target = Store(store)
        cells = self.cells()
        if order is not None:
            random.Random(order).shuffle(cells)
        for levels in cells:
            for seed in self.seeds:
                status = self.status(levels, seed)
                if status != "missing":
                    self.write_result(target, levels, seed, status)
        target.write_sweep(self.description(cells))
        return target

    def write_result(self, store: Store, levels: Levels, seed: int, status: str) -> None:
        trial = self.trial(levels, seed)
        result = self.result(levels, seed, status)
        self.change(result, levels, seed)
        if status == "done":
            details = self.details(levels, seed)
            result = {**result, "files": store.write_details(trial, **details)}
        (store.trial_directory(trial) / "result.json").unlink(missing_ok=True)
        store.write_result(result)

    def details(self, levels: Levels, seed: int) -> dict[str, Any]:
        """Return arguments of `Store.write_details`."""
        return {"items": self.outcomes(levels, seed)} if self.items else {}

    def description(self, cells: list[dict[str, str]]) -> dict[str, Any]:
        return {
            "name": self.name,
            "question": self.question,
            "factors": {factor: list(levels) for factor, levels in self.factors.items()},
            "patches": {
                factor: {base: {}} | {level: {f"model.{factor}": level} for level in others}
                for factor, (base, *others) in self.factors.items()
            },
            "baseline": {factor: levels[0] for factor, levels in self.factors.items()},
            "design": self.design,
            "rules": [],
            "notes": list(self.notes),
            "seeds": list(self.seeds),
            "cells": [
                {"levels": c, "trials": {str(seed): self.trial(c, seed) for seed in self.seeds}}
                for c in cells
            ],
            "yaml": "question: made\n",
            "yaml_sha256": digest("yaml"),
            "experiment_yaml": "name: made\n",
            "command": f"kvlab submit sweeps/{self.name}.yaml",
        }

    def loss(self, levels: Levels, seed: int) -> float:
        noise = random.Random(self.training(levels, seed)).gauss(0.0, self.noise)
        shared = random.Random(f"{self.name} {seed}").gauss(0.0, self.seed_noise)
        return 4.0 + shared + noise + sum(self.effects.get(v, 0.0) for v in levels.values())

    def bytes(self, levels: Levels) -> int:
        size = 2**20
        for level in levels.values():
            size //= _KV.get(level, 1)
        return size

    def outcomes(self, levels: Levels, seed: int) -> list[dict[str, Any]]:
        chance = random.Random(f"{self.training(levels, seed)} items")
        tied = "tied" in levels.values()
        found = []
        for index in range(self.items):
            right = chance.random() < 0.4
            served = right and not (tied and chance.random() < 0.5)
            ways = {
                way: {"scores": [0.0] * 4, "prediction": 1 - ok, "prediction_norm": 1 - ok}
                for way, ok in (("one_shot", right), ("served", served))
            }
            part = {"shortened": False, "divisors": [12, 9, 14, 10], **ways}
            found.append({"ind": index, "label": 0, "completion": part, "lmeval": part})
        return found

    def measurements(self, levels: Levels, seed: int) -> dict[str, float]:
        loss = self.loss(levels, seed)
        tied = "tied" in levels.values()
        served = loss + (TIED_GAP if tied else 0.0)
        stored = self.bytes(levels)
        time = random.Random(f"{self.trial(levels, seed)} time")
        found: dict[str, float] = {
            "loss": loss, "loss_served": served, "serving_gap": served - loss,
            "bits_per_byte": loss / 3.0, "bits_per_byte_served": served / 3.0,
            "kv_bytes_formula": stored, "kv_bytes_storage": stored,
            "kv_bytes_read": stored * (2 if tied or "trained" in levels.values() else 1),
            "peak_bytes_cached": stored + 5 * 10**6, "peak_bytes_uncached": 6 * 10**6,
            "ttft_ms": time.uniform(3.0, 3.2), "tpot_ms_p50": time.uniform(1.0, 1.1),
            "tpot_ms_p95": time.uniform(1.2, 1.3), "tokens_per_second": time.uniform(900, 1000),
        }  # fmt: skip
        if self.items:
            outcomes = self.outcomes(levels, seed)
            found["hellaswag_items"] = self.items
            ways = {"acc": "one_shot", "acc_norm": "one_shot", "acc_norm_served": "served"}
            for name, way in ways.items():
                right = sum(o["completion"][way]["prediction_norm"] == 0 for o in outcomes)
                found[f"hellaswag_{name}"] = right / self.items
            share = found["hellaswag_acc_norm"]
            found["hellaswag_acc_norm_stderr"] = (share * (1 - share) / (self.items - 1)) ** 0.5
        return found

    def result(self, levels: Levels, seed: int, status: str) -> dict[str, Any]:
        done = status == "done"
        loss = self.loss(levels, seed)
        steps = [round(150 * (n + 1) / self.points) for n in range(self.points)]
        curve = [[step, 4096 * step, loss + 2.0 * (150 - step) / 150] for step in steps]
        return {
            "trial": self.trial(levels, seed),
            "training": self.training(levels, seed),
            "status": status,
            "seed": seed,
            "experiment": {
                "name": "made",
                "model": {"n_layer": 6, "block_size": 256,
                          "n_kv_head": 1 if "mqa" in levels.values() else 4, "window": None, "kv_sharing": [[0, 1], [2, 3]]},
                "data": {"source": "docstrings", "tokenizer": "gpt2:2048", "paths": []},
                "training": {"tokens": 614400, "learning_rate": 3e-3},
            },
            "kv": {"owners": [0, 1, 2], "kinds": "GLL", "bytes_per_token": 1024,
                   "bytes_at_block_size": self.bytes(levels)},
            "model": {"parameters": 1_000_000 - 30_000 * ("mqa" in levels.values()),
                      "training_flops": 10**12},
            "measurements": self.measurements(levels, seed) if done else {},
            "curves": dict.fromkeys(("train_loss", "validation_loss"), curve if done else []),
            "training_record": {"steps": 150, "tokens": 614400, "seconds": 10.0,
                                "tokens_per_second": 61440.0, "resumed_from": [],
                                "peak_bytes": 10**8} if done else None,
            "error": None if done else {
                "class": "diverged" if status == "diverged" else "bug",
                "type": "Diverged" if status == "diverged" else "ValueError",
                "message": self.error,
                "traceback": "attempts/1/traceback.txt",
            },
            "provenance": {
                "commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False,
                "kvlab": "0.1.0", "python": "3.11.9",
                "versions": {"numpy": "2.4.6", "torch": "2.11.0"},
                "device": "cpu", "threads": 1,
                "data": {"identity": "d" * 64, "digest": "e" * 64, "licence": "BSD",
                         "tokenizer": "gpt2:2048"},
                "command": f"kvlab submit sweeps/{self.name}.yaml",
                "started": f"2026-01-02T03:{seed:02d}:00Z",
                "finished": f"2026-01-02T03:{seed:02d}:30Z", "attempts": 1,
            },
        }  # fmt: skip


class ServedRecord(Record):
    """Tied cells have the weights of untied ones, and are served otherwise; rope saves no byte."""

    def description(self, cells: list[dict[str, str]]) -> dict[str, Any]:
        found = super().description(cells)
        found["patches"]["sharing"]["tied"] = {"serving.tie": "adjacent:2"}
        return found


class MatchedRecord(Record):
    """Multi-query cells with the parameters of the baseline, which their MLP gives back."""

    def __init__(self):
        super().__init__(factors={"heads": ("mha", "mqa")}, effects={"mqa": 0.05})

    def description(self, cells):
        return {**super().description(cells), "match": ["parameters"]}

    def result(self, levels, seed, status):
        found = super().result(levels, seed, status)
        is_resized = levels["heads"] == "mqa"
        found["experiment"]["model"]["ffn_dim"] = 70 if is_resized else 64
        found["model"]["parameters"] += 29_000 * is_resized
        return found


TUNED_LOSSES = {
    "mha": {1e-3: (4.2, 4.3), 2e-3: (4.0, 4.1), 4e-3: (4.1, 4.2)},
    "mqa": {1e-3: (4.4, 4.5), 2e-3: (4.3, 4.4), 4e-3: (4.2, 4.3), 8e-3: (4.1, None)},
}
"""Losses while tuning, by heads, rate and seed; None diverged."""


class TunedRecord(Record):
    """Heads whose learning rate was tuned at seeds 100 and 101: mha's has a vertex, mqa's not."""

    def __init__(self, tokens=None, is_over=True, **changes):
        super().__init__(**{"factors": {"heads": ("mha", "mqa")}, **changes})
        self.tokens, self.is_over = tokens, is_over

    def description(self, cells):
        optima = {
            "mha": {"value": 2.28e-3, "loss": 4.03, "log_error": 0.05, "flag": ""},
            "mqa": {"value": 4e-3, "loss": 4.25, "log_error": None, "flag": "beside divergence"},
        }
        architectures = [
            {
                "levels": {"heads": heads}, "cells": [{"heads": heads}], "recipe": 6e-4,
                "points": [{"value": rate, "losses": {"100": first, "101": second}}
                           for rate, (first, second) in points.items()],
                "optimum": optima[heads] if self.is_over else None,
            }
            for heads, points in TUNED_LOSSES.items()
        ]  # fmt: skip
        tuning = {
            "key": "training.learning_rate", "grid": [1e-3, 2e-3, 4e-3], "seeds": [100, 101],
            "tokens": self.tokens, "is_over": self.is_over, "architectures": architectures,
            "cells": [],
        }  # fmt: skip
        return {**super().description(cells), "tuning": tuning}


def no_learned_hybrid(levels: Levels) -> bool:
    """Exclude what the shipped sweeps exclude: a hybrid horizon needs relative positions."""
    return levels["position"] == "learned" and levels["horizon"] == "hybrid"


SIZES = {"small": 1_000_000, "large": 10_000_000, "middle": 3_000_000}
_PLACES = {"small": 0.0, "middle": math.log10(3), "large": 1.0}


class SizedRecord(Record):
    """Multi-query attention costs less in larger models; rope gains the same in all."""

    def __init__(self, predict=(), **changes):
        made = {
            "factors": {"size": tuple(SIZES), "heads": ("mha", "mqa"), "position": ("learned", "rope")},
            "effects": {"mqa": 0.10, "rope": -0.05},
            "seeds": (0, 1, 2, 3),
        }  # fmt: skip
        super().__init__(**{**made, **changes})
        self.predict = predict

    def loss(self, levels, seed):
        trend = -0.04 * _PLACES[levels["size"]] * ("mqa" in levels.values())
        return super().loss(levels, seed) + trend - 0.3 * _PLACES[levels["size"]]

    def description(self, cells):
        size = {"factor": "size", "predict": list(self.predict), "parameters": SIZES}
        return {**super().description(cells), "size": size}
