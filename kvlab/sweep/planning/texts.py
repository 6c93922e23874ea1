"""The texts of a plan: the digest that enters the ids, and whether they hold what is asked.

The digest is that of the tokens, so a text is prepared before its trials have their ids. A plan
that is only shown prepares no more than a small text of one's own, in a second or two: of a text
that is not prepared, and that the record of the sweep does not know, the ids are provisional.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvlab.errors import DataError, Problem, SpecError, StoreError, UsageError
from kvlab.spec import DataConfig
from kvlab.spec.data_config import SOURCES
from kvlab.spec.experiment import Experiment
from kvlab.spec.sweep import Cell, Sweep
from kvlab.spec.validation_errors import FieldError
from kvlab.store import Store

if TYPE_CHECKING:
    from kvlab.data.shards import DatasetFacts

IdentifyDataset = Callable[[DataConfig], "DatasetFacts | None"]
"""Return the facts of a prepared dataset, its digest among them; None if it is not prepared."""


class PlannedTexts:
    """The texts of a plan: their identities, and what is asked of them.

    Args:
        sweep: Gives the file, line and column of errors.
        identify: Returns the facts of a text, None if it is not prepared.
        provisional: Take a text that is not here as absent instead of raising an error.
        known: Facts of texts by their `kvlab.data.dataset_identity`, from the record of the sweep.

    Attributes:
        absent, notes: See `kvlab.sweep.planning.planner.Plan`.
    """

    def __init__(
        self,
        sweep: Sweep,
        identify: IdentifyDataset,
        provisional: bool,
        known: "Mapping[str, DatasetFacts]",
    ):
        self._sweep, self._identify, self._provisional = sweep, identify, provisional
        self._known = known
        self._facts: dict[DataConfig, DatasetFacts | None] = {}
        self.absent: list[str] = []
        self.notes: list[str] = []

    def check(self, cells: Sequence[Cell]) -> None:
        """Identify the texts of all cells, and check that they hold what the cells ask for.

        Raises:
            SpecError: A text does not, or cannot be read; all problems with file, line, column.
            DataError: A text is unavailable, for a reason that is in no file of the sweep.
        """
        problems: list[Problem] = []
        for cell in cells:
            experiment = with_absolute_paths(cell.experiment)
            try:
                if experiment.data not in self._facts:
                    self._facts[experiment.data] = self._find(experiment.data)
            except DataError as error:
                if error.field is None:
                    raise
                problems.append(self._locate(error.field, str(error), cell))
                self._facts[experiment.data] = None
            problems += self._find_problems(experiment, cell)
        if problems:
            raise SpecError(problems)

    def _find(self, data: DataConfig) -> "DatasetFacts | None":
        """Return the facts of a text; None if it is not available yet."""
        reason = f"the text of data.source = {data.source} is not prepared; `kvlab submit` does it"
        try:
            facts = self._identify(data)
            if facts is None and self._known:
                from kvlab.data.dataset_preparation import dataset_identity

                facts = self._known.get(dataset_identity(data))
            if facts is None and self._identify is find_text:
                facts = prepare_small_text(data)
        except DataError as error:
            if not self._provisional or error.field is not None:
                raise
            facts, reason = None, str(error)
        if facts is None:
            self.absent.append(reason)
        else:
            self.notes += [line for line in facts.warnings if line not in self.notes]
        return facts

    def _find_problems(self, experiment: Experiment, cell: Cell) -> Iterator[Problem]:
        facts = self._facts[experiment.data]
        if facts is None:
            return
        from kvlab.data.requirements import find_shortages, scale_defaults

        experiment, note = scale_defaults(experiment, facts)
        if note is not None and note not in self.notes:
            self.notes.append(note)
        for key, message in find_shortages(experiment, facts):
            yield self._locate(key, message, cell)

    def _locate(self, key: str, message: str, cell: Cell) -> Problem:
        path = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
        return self._sweep.locate(FieldError(path, message), cell.levels)

    def fit(self, experiment: Experiment) -> Experiment:
        """Return an experiment whose default token counts fit its text."""
        facts = self._facts[experiment.data]
        if facts is None:
            return experiment
        from kvlab.data.requirements import scale_defaults

        return scale_defaults(experiment, facts)[0]

    def facts(self) -> "tuple[DatasetFacts, ...]":
        """Return the facts of the texts that are available."""
        return tuple(facts for facts in self._facts.values() if facts is not None)

    def identity(self, data: DataConfig) -> str:
        """Return the digest of a text; a name in its place if it is not available yet."""
        facts = self._facts[data]
        return f"absent {data.source}" if facts is None else facts.digest


def prepare_text(
    data: DataConfig, on_progress: Callable[[str], None] | None = None
) -> "DatasetFacts":
    """Prepare a text if it is not, and return its facts.

    Args:
        on_progress: Called with lines for people.
    """
    from kvlab.data.dataset_preparation import prepare_dataset
    from kvlab.data.shards import read_dataset_facts

    return read_dataset_facts(prepare_dataset(data, on_progress).folder)


def find_text(data: DataConfig) -> "DatasetFacts | None":
    """Return the facts of a prepared text."""
    from kvlab.data.dataset_preparation import find_dataset

    return find_dataset(data)


def prepare_small_text(data: DataConfig) -> "DatasetFacts | None":
    """Prepare a small text of one's own; return None for another.

    No shorter way shows whether it can be prepared, and holds what is asked.
    """
    from kvlab.data.dataset_preparation import is_small_text

    is_small = SOURCES[data.source].reads_paths and is_small_text(data)
    return prepare_text(data) if is_small else None


def describe_texts(texts: "Iterable[DatasetFacts]") -> dict[str, Any]:
    """Return what ``sweep.json`` keeps of the texts, so that a plan needs no tokens."""
    facts = {text.identity: asdict(text) for text in texts if text.identity}
    return {"texts": facts} if facts else {}


def read_known_texts(store: Store, sweep: str) -> "dict[str, DatasetFacts]":
    """Return what the record of a sweep keeps of its texts; see `describe_texts`."""
    try:
        recorded = store.sweep(sweep).get("texts", {})
    except (UsageError, StoreError):
        return {}
    from kvlab.data.shards import DatasetFacts

    return {
        identity: DatasetFacts(**{**facts, "warnings": tuple(facts["warnings"])})
        for identity, facts in recorded.items()
    }


def with_absolute_paths(experiment: Experiment) -> Experiment:
    """Make text paths absolute, so that any worker finds them from its working folder."""
    data = experiment.data
    if not data.paths:
        return experiment
    paths = tuple(os.path.abspath(path) for path in data.paths)
    return experiment.model_copy(update={"data": data.model_copy(update={"paths": paths})})
