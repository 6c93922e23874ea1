"""A made record of trials that answered tasks of lm-eval."""

from dataclasses import dataclass
from typing import Any

from tests.support.record_factory import Levels, Record, digest

TASK_ITEMS = 40


@dataclass
class LmEvalRecord(Record):
    """Trials that answered a task of right and wrong items, and one with a perplexity.

    The first level of the first factor is right in ``right`` of `TASK_ITEMS`, the others in 20
    fewer, whatever the seed.
    """

    right: int = 30

    def answers(self, levels: Levels) -> list[float]:
        factor, (base, *_) = next(iter(self.factors.items()))
        right = self.right if levels[factor] == base else self.right - 20
        return [float(item < right) for item in range(TASK_ITEMS)]

    def measurements(self, levels: Levels, seed: int) -> dict[str, float]:
        return super().measurements(levels, seed) | {
            "lm_eval_letters_acc": sum(self.answers(levels)) / TASK_ITEMS,
            "lm_eval_letters_items": TASK_ITEMS,
            "lm_eval_prose_word_perplexity": 20.0 + seed,
            "lm_eval_prose_items": 3,
        }

    def details(self, levels: Levels, seed: int) -> dict[str, Any]:
        facts = {"harness": "0.4.13", "version": 1.0}
        outcomes = {"lm_eval_letters_acc": self.answers(levels)}
        letters = {**facts, "items": digest("letters"), "outcomes": outcomes}
        prose = {**facts, "items": digest("prose"), "outcomes": {}}
        tasks = {"letters": letters, "prose": prose}
        return {**super().details(levels, seed), "tasks": tasks}


RECORD = LmEvalRecord()
