"""What a training leaves behind besides its weights: `training.json`."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvlab.errors import StoreError
from kvlab.fs.atomic_files import read_json, write_json
from kvlab.fs.lease import Fence

CURVE_POINTS = 500
"""About as many points as a training curve keeps; each is the mean loss of the steps since the
one before it."""

Curve = list[list[float]]
"""Points ``[step, tokens, loss]``; loss in nats a token, after ``step`` steps."""


@dataclass(frozen=True)
class TrainingRecord:
    """One finished training.

    Attributes:
        steps, tokens: optimizer steps, and the tokens that they saw.
        seconds: time in optimizer steps, over all attempts, without validation, checkpoints
            and steps that were lost and done again.
        tokens_per_second: rate of those steps, without each attempt's first, which warms up
            and compiles.
        train_curve, validation_curve: see `Curve`.
        resumed_from: the step at which each later attempt went on.
        peak_bytes: most device memory allocated; on CPU the largest resident size of the
            process that finished the training, whatever else that process did. Of several
            workers, the first one's.
        workers: processes that trained together, each with one device.
        flops_per_second, mfu: of all devices together; as a share of their peaks. See
            `kvlab.train.mfu`.
        peak_flops_per_second, peak_flops_origin: of one device; ``stated`` or ``measured``.
    """

    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    train_curve: Curve
    validation_curve: Curve
    resumed_from: list[int]
    peak_bytes: int
    workers: int
    flops_per_second: float
    mfu: float
    peak_flops_per_second: float
    peak_flops_origin: str


def write_training_record(
    directory: Path, record: TrainingRecord, fence: Fence | None = None
) -> None:
    """Writes ``directory/training.json``: from now on the training is finished."""
    write_json(directory / "training.json", {"schema": 1, **asdict(record)}, fence=fence)


def write_rung(
    directory: Path, rung: int, step: int, loss: float, fence: Fence | None = None
) -> None:
    """Adds to ``directory/rungs.json`` the validation loss at a rung of a search.

    Args:
        rung: the step after which the training was to pause.
        step: the step after which it did: later, if it had gone further before.
        loss: nats a token.
    """
    path = directory / "rungs.json"
    try:
        rungs = read_json(path)["rungs"]
    except FileNotFoundError:
        rungs = {}
    rungs = {**rungs, str(rung): {"step": step, "loss": loss}}
    write_json(path, {"schema": 1, "rungs": rungs}, fence=fence)


def load_training_record(directory: str | Path) -> TrainingRecord | None:
    """The record of a finished training, or None if ``directory`` holds none.

    Raises:
        StoreError: ``training.json`` is damaged.
    """
    path = Path(directory) / "training.json"
    try:
        found: dict[str, Any] = read_json(path)
        return TrainingRecord(**{key: found[key] for key in TrainingRecord.__dataclass_fields__})
    except FileNotFoundError:
        return None
    except (KeyError, TypeError) as error:
        raise StoreError(f"{path} lacks {error}; remove it to train again") from None
