"""Trunks: the stable phase of wsd that trainings of several token budgets have in common.

Such trainings differ in `tokens`, `decay_tokens` and `final_learning_rate` alone, so that up to its
decay each is bitwise the beginning of the longest. That phase is trained once, and every budget
branches from it (Hägele et al., arXiv 2405.18392). Nothing waits on it: a training that finds no
checkpoint to branch from takes all steps itself, with the same result.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.store import Store
from kvlab.trial.trial import Trial


@dataclass(frozen=True)
class Branch:
    """What one training has in common with the others of its trunk.

    Attributes:
        shared_steps: Steps after which it keeps a checkpoint for others.
        source: Id of the trial whose stable phase it branches from; None if that is in the store,
            or if it trains the phase itself.
    """

    shared_steps: tuple[int, ...] = ()
    source: str | None = None
    steps: int = 0


def plan_branches(trials: Sequence[Trial], store: Store | None) -> dict[str, Branch]:
    """Return the branch of every training that may share a trunk, by training id.

    The longest stable phase of a trunk is trained from the newest checkpoint in the store, if
    there is one; every other training branches from that.
    """
    trunks = defaultdict[str, list[Trial]](list)
    for trial in trials:
        if trial.trunk_id is not None:
            trunks[trial.trunk_id].append(trial)
    branches: dict[str, Branch] = {}
    for trunk_id, members in trunks.items():
        stored = store.trunk_steps(trunk_id) if store is not None else []
        stable = {trial.id: trial.experiment.training.stable_steps for trial in members}
        longest = max(members, key=lambda trial: stable[trial.id])
        for trial in members:
            own = stable[trial.id]
            others = {min(own, stable[other.id]) for other in members if other is not trial}
            is_trunk = trial is longest
            start = max((step for step in stored if step <= own), default=0) if is_trunk else own
            source = None if is_trunk or start in stored else longest.id
            branches[trial.training_id] = Branch(tuple(sorted(others)), source, start)
    return branches
