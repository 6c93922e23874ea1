"""The texts of a plan: the digest that enters the ids, and whether they hold what is asked.

The digest is that of the tokens, so a text is prepared before its trials have their ids. A plan
that is only shown prepares no more than a small text of one's own, in a second or two: of a text
that is not prepared, and that the record of the sweep does not know, the ids are provisional.
"""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvlab.data import dataset_preparation as datasets
from kvlab.data.requirements import find_shortages, scale_defaults
from kvlab.data.shards import DatasetFacts, read_dataset_facts
from kvlab.errors import DataError, Problem, SpecError, StoreError, UsageError
from kvlab.spec import DataConfig, Experiment, Sweep
from kvlab.spec.data_config import find_entry
from kvlab.spec.sweep import Cell
from kvlab.spec.validation_errors import FieldError
from kvlab.store import Store
from kvlab.store.record_forms import refuse_malformed

IdentifyDataset = Callable[[DataConfig], DatasetFacts | None]
"""Return the facts of a prepared dataset, its digest among them; None if it is not prepared."""


@dataclass
class PlannedTexts:
    """The texts of a plan: their identities, and what is asked of them.

    Args:
        provisional: Take a text that is not here as absent instead of raising an error.
        known: Facts of texts by their `kvlab.data.dataset_identity`, from the record of the sweep.

    Attributes:
        absent, notes: See `kvlab.sweep.planning.planner.Plan`.
    """

    sweep: Sweep
    identify: IdentifyDataset
    provisional: bool
    known: Mapping[str, DatasetFacts]
    absent: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _facts: dict[DataConfig, DatasetFacts | None] = field(default_factory=dict)

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
            facts = self._facts[experiment.data]
            if facts is not None:
                experiment, note = scale_defaults(experiment, facts)
                if note is not None and note not in self.notes:
                    self.notes.append(note)
                shortages = find_shortages(experiment, facts)
                problems += [self._locate(key, message, cell) for key, message in shortages]
        if problems:
            raise SpecError(problems)

    def _find(self, data: DataConfig) -> DatasetFacts | None:
        """Return the facts of a text; None if it is not available yet."""
        reason = f"the text of data.source = {data.source} is not prepared; `kvlab submit` does it"
        try:
            facts = self.identify(data)
            if facts is None and self.known:
                facts = self.known.get(datasets.dataset_identity(data))
            # no shorter way shows whether a text of one's own can be prepared, and what it holds
            is_own = any(find_entry(part.data.source).reads_paths for part in data.parts)
            is_own &= self.identify is datasets.find_dataset
            if facts is None and is_own and datasets.is_small_text(data):
                facts = prepare_text(data)
        except DataError as error:
            if not self.provisional or error.field is not None:
                raise
            facts, reason = None, str(error)
        if facts is None:
            self.absent.append(reason)
        else:
            self.notes += [line for line in facts.warnings if line not in self.notes]
        return facts

    def _locate(self, key: str, message: str, cell: Cell) -> Problem:
        path = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
        return self.sweep.locate(FieldError(path, message), cell.levels)

    def fit(self, experiment: Experiment) -> Experiment:
        """Return an experiment whose default token counts fit its text."""
        facts = self._facts[experiment.data]
        return experiment if facts is None else scale_defaults(experiment, facts)[0]

    def facts(self) -> tuple[DatasetFacts, ...]:
        """Return the facts of the texts that are available."""
        return tuple(facts for facts in self._facts.values() if facts is not None)

    def identity(self, data: DataConfig) -> str:
        """Return the digest of a text; a name in its place if it is not available yet."""
        facts = self._facts[data]
        return f"absent {data.source}" if facts is None else facts.digest


def prepare_text(
    data: DataConfig, on_progress: Callable[[str], None] | None = None
) -> DatasetFacts:
    """Prepare a text if it is not, and return its facts."""
    return read_dataset_facts(datasets.prepare_dataset(data, on_progress).folder)


def read_known_texts(store: Store, sweep: str) -> dict[str, DatasetFacts]:
    """Return what the record of a sweep keeps of its texts, so that a plan needs no tokens."""
    with contextlib.suppress(UsageError, StoreError), refuse_malformed(sweep):
        recorded = store.sweep(sweep).get("texts", {})
        return {
            identity: DatasetFacts(**{**facts, "warnings": tuple(facts["warnings"])})
            for identity, facts in recorded.items()
        }
    return {}


def with_absolute_paths(experiment: Experiment) -> Experiment:
    """Make text paths absolute, so that any worker finds them from its working folder."""
    data = experiment.data
    if not data.paths:
        return experiment
    paths = tuple(os.path.abspath(path) for path in data.paths)
    return experiment.model_copy(update={"data": data.model_copy(update={"paths": paths})})
