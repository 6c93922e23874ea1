"""Forms of the record's JSON files: the types of what is read back, checked before it is used.

A seal shows that a file is what was written, not that kvlab wrote it. A value of another type, or a
number that no trial can measure, is refused as damage, with its place in the file.
"""

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, InstanceOf, with_config
from typing_extensions import TypedDict

from kvlab.errors import RecordDamaged
from kvlab.spec.spec_model import NAME_PATTERN

LARGEST = 1e60
"""No quantity of a record is larger. Sums and squares of it are finite."""

Number = Annotated[float, Field(allow_inf_nan=False, ge=-LARGEST, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=10**40)]
Seed = Annotated[str, Field(pattern=r"^[0-9]{1,20}$")]
Identifier = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Text = InstanceOf[str]
"""Any string: half a character, too, as in the name of a file."""
Scalar = None | bool | int | float | Text
Point = Annotated[list[Number], Field(min_length=3, max_length=3)]
_strict = with_config(ConfigDict(strict=True))


@_strict
class CurvesForm(TypedDict):
    train_loss: NotRequired[list[Point]]
    validation_loss: NotRequired[list[Point]]


@_strict
class ErrorForm(TypedDict):
    message: Text
    type: NotRequired[Text]
    traceback: NotRequired[Text | None]


@_strict
class KVForm(TypedDict):
    owners: NotRequired[list[Count]]
    kinds: NotRequired[Text]
    bytes_per_token: NotRequired[Number]
    bytes_at_block_size: NotRequired[Number]


@_strict
class ModelForm(TypedDict):
    parameters: NotRequired[Count]
    training_flops: NotRequired[Number]


@_strict
class LineForm(TypedDict):
    """One line of a benchmark; see `kvlab.benchmark.measurement`."""

    part: NotRequired[Text]
    metric: NotRequired[Text]
    variant: NotRequired[Text]
    unit: NotRequired[Text]
    value: NotRequired[Number | None]
    low: NotRequired[Number | None]
    high: NotRequired[Number | None]
    note: NotRequired[Text | None]


@_strict
class PrunedForm(TypedDict):
    step: Count
    steps: Count
    loss: Number


@_strict
class ProvenanceForm(TypedDict):
    commit: NotRequired[Text | None]
    versions: NotRequired[dict[Text, Text | None]]
    data: NotRequired[dict[Text, Text | dict[Text, Number] | None] | None]
    command: NotRequired[Text | None]
    started: NotRequired[Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")]]
    finished: NotRequired[Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")]]
    attempts: NotRequired[Count]


@_strict
class ResultForm(TypedDict):
    """``result.json``; see `kvlab.store.result.build_result`."""

    schema: int
    trial: Identifier
    training: Identifier
    status: Text
    seed: NotRequired[Count]
    experiment: NotRequired[dict[Text, dict[Text, Any] | Scalar]]
    kv: NotRequired[KVForm]
    model: NotRequired[ModelForm]
    measurements: NotRequired[dict[Text, Number]]
    curves: NotRequired[CurvesForm]
    benchmark: NotRequired[list[LineForm]]
    needle: NotRequired[list[dict[Text, Number | None]]]
    training_record: NotRequired[dict[Text, Any] | None]
    error: NotRequired[ErrorForm | None]
    pruned: NotRequired[PrunedForm]
    provenance: NotRequired[ProvenanceForm]
    files: NotRequired[dict[Text, dict[Text, Any]]]


TrainedFilesForm = TypedDict("TrainedFilesForm", {"final/model.safetensors": dict[Text, Any]})


@_strict
class TrainingForm(TypedDict):
    """``training.json``; see `kvlab.train.training_record.TrainingRecord`."""

    files: TrainedFilesForm


@_strict
class CellForm(TypedDict):
    levels: dict[Text, Text]
    trials: dict[Seed, Identifier | Annotated[str, Field(max_length=0)]]


@_strict
class PastForm(TypedDict):
    params: dict[Text, Any]
    state: Text
    values: list[Number]
    excess: dict[Text, Number]
    notes: dict[Text, Any]
    rungs: list[Number]


@_strict
class PointForm(TypedDict):
    """``points/<level>.json``; see `kvlab.sweep.search.search_history.Suggestion`."""

    past: PastForm
    level: Text
    patch: dict[Text, Any]
    trial: Text
    flops: Number
    why: Text
    training: Text
    steps: Count
    kept: bool
    cell: CellForm | None


@_strict
class TimedTrialForm(TypedDict):
    result: Text
    measurements: dict[Text, Number]
    benchmark: list[LineForm]


@_strict
class TimingSessionForm(TypedDict):
    seed: int
    started: Text
    finished: Text
    device: Text
    threads: Count
    commit: Text | None
    trials: dict[Identifier, TimedTrialForm]
    failure: NotRequired[Text]


@_strict
class TimingsForm(TypedDict):
    """``timings.json``; see `kvlab.store.timings`."""

    sessions: list[TimingSessionForm]


@_strict
class HistoryForm(TypedDict):
    """``search.json``; see `kvlab.sweep.search.search_history.save_history`."""

    seconds: Number
    flops: NotRequired[Number]


@_strict
class SweepForm(TypedDict):
    """``sweep.json``; see `kvlab.sweep.planning.planner.describe_sweep`."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    question: NotRequired[Text]
    factors: dict[Text, Annotated[list[Text], Field(min_length=1)]]
    baseline: NotRequired[dict[Text, Text]]
    seeds: NotRequired[list[Count]]
    cells: list[CellForm]
    patches: NotRequired[dict[Text, dict[Text, dict[Text, Any]]]]
    design: NotRequired[Text]
    rules: NotRequired[list[Text]]
    notes: NotRequired[list[Text]]
    decide: NotRequired[dict[Text, Any] | None]
    report: NotRequired[dict[Text, Any] | None]
    reported_seeds: NotRequired[list[list[Count]]]
    yaml: NotRequired[Text]
    experiment_yaml: NotRequired[Text]
    command: NotRequired[Text]
    tuning: NotRequired[dict[Text, Any] | None]
    search: NotRequired[dict[Text, Any] | None]
    stages: NotRequired[dict[Text, Any] | None]
    looks: NotRequired[dict[Text, Any] | None]
    size: NotRequired[dict[Text, Any] | None]


@_strict
class RungForm(TypedDict):
    step: Count
    loss: Number


@_strict
class RungsForm(TypedDict):
    """``rungs.json``; see `kvlab.train.training_record.write_rung`."""

    rungs: dict[Seed, RungForm]


@_strict
class ReportedForm(TypedDict):
    """``reported.json``; see `kvlab.store.store.Store.note_report`."""

    seeds: list[list[Count]]


@_strict
class ProgressForm(TypedDict):
    """``progress.json``; see `kvlab.store.attempt.ProgressReporter`."""

    stage: NotRequired[Text]
    step: NotRequired[Count]
    steps: NotRequired[Count]
    loss: NotRequired[Number | None]
    tokens_per_second: NotRequired[Number | None]
    flops_per_second: NotRequired[Number | None]
    mfu: NotRequired[Number | None]
    peak_bytes: NotRequired[Number | None]
    process_bytes: NotRequired[Number | None]
    seconds_left: NotRequired[Number | None]
    note: NotRequired[Text | None]
    curves: NotRequired[CurvesForm | None]


def check_cells(path: Path, sweep: Mapping[str, Any]) -> None:
    """Check that the cells of a sweep's description are of its factors.

    Raises:
        RecordDamaged: A cell or the baseline has other factors or levels.
    """
    factors = {factor: set(levels) for factor, levels in sweep["factors"].items()}
    if not factors:
        return
    baseline = [sweep["baseline"]] if "baseline" in sweep else []
    for levels in [*baseline, *(cell["levels"] for cell in sweep["cells"])]:
        is_known = all(levels.get(factor) in known for factor, known in factors.items())
        if not is_known or levels.keys() - factors.keys():
            text = f"{path} is damaged: its factors do not have the cell"
            raise RecordDamaged(f"{text} {' '.join(levels.values())[:200]}")


@contextmanager
def refuse_malformed(what: str) -> Iterator[None]:
    """Raise RecordDamaged for values of a record that readers of the block cannot use.

    The forms cover what every reader uses. Of the rest, a reader finds out here.

    Args:
        what: Whose record is read, for the message.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if error.__class__.__module__.startswith("kvlab."):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        text = f"the record of {what} has a value that kvlab cannot read ({reason}, in"
        text += f" {Path(frame.filename).name}:{frame.lineno})"
        hint = "submit the sweep again, which writes its description anew, or look at its files"
        raise RecordDamaged(f"{text}; {hint}; if they are right, this is a bug") from error
