"""Text and evaluation sets, made ready once before the trials that need them start."""

from collections.abc import Callable, Iterable

from kvlab.data import get_hellaswag, prepare
from kvlab.sweep.plan import PlannedTrial


def prefetch(
    missing: Iterable[PlannedTrial], say: Callable[[str], None], check_stop: Callable[[], None]
) -> None:
    """Prepares every distinct text of ``missing``, and HellaSwag if one of them scores it.

    Workers could do it themselves, since making them is locked; but all would wait for one,
    each holding its cores, and an evaluation set that cannot be had would be noticed only after
    hours of training.

    Args:
        say: takes lines for a person.
        check_stop: called with each of them; what it raises ends the preparation, which goes on
            from there the next time.

    Raises:
        DataError: some text or set cannot be had.
    """

    def report(line: str) -> None:
        say(line)
        check_stop()

    experiments = [planned.trial.experiment for planned in missing]
    for data in dict.fromkeys(experiment.data for experiment in experiments):
        check_stop()
        prepare(data, report)
    if any(experiment.evaluation.hellaswag_items != 0 for experiment in experiments):
        check_stop()
        get_hellaswag(report)
