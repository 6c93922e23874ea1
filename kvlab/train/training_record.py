"""The record of a finished training (`training.json`), and rungs of a search (`rungs.json`)."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvlab.fs import sealed_files
from kvlab.fs.lease import Fence
from kvlab.own_extensions import name_members

CURVE_POINTS = 500
"""Approximate number of points of a training curve. Each is the mean loss of the steps since the
point before it."""

PROGRESS_POINTS = 100
"""The same of a training that goes on: its progress is written twice a second."""

SEALED_FILES = ("config.json", "start.json", "final/model.safetensors")
"""Files of a finished training, beside its record."""

Curve = list[list[float]]
"""Points ``[step, tokens, loss]``: loss in nats per token after ``step`` steps."""


@dataclass(frozen=True)
class TrainingRecord:
    """One finished training.

    Attributes:
        steps, tokens: optimizer steps, and the tokens in them.
        seconds: time in optimizer steps over all attempts, without validation, checkpoints
            and steps that were lost and repeated.
        tokens_per_second: rate of those steps without the first one of each attempt, which
            warms up and compiles.
        train_curve, validation_curve: see `Curve`.
        resumed_from: the step from which each later attempt resumed.
        branched_at: the step after which this training went on from the stable phase that another
            token budget had trained; None if it took all steps itself. Those steps and their
            seconds are part of this record all the same.
        checkpoint_seconds: time in which steps waited for checkpoints, over all attempts.
        compile_seconds: time in which `torch.compile` compiled, most of it in the first step of an
            attempt, over all attempts. What the cache has takes less. 0 without compiling.
        peak_bytes: the most memory that the training held in its last attempt: weights, gradients,
            optimizer state, activations and logits. On CUDA what PyTorch's allocator gave out, on
            CPU the growth of the process. With several workers that of rank zero.
        workers: processes that trained together, each with one device.
        flops_per_second, mfu: of all devices together, and as a share of their peaks. See
            `kvlab.train.mfu`.
        peak_flops_per_second, peak_flops_origin: of one device; ``stated`` or ``measured``.
        attention: the attention kernels that ran, torch's by its names; None of a record from
            before they were noted.
        products: of extensions, by name, see `kvlab.model.kernels.linear.LinearProducts.describe`;
            None of one that computed nothing. Each is a key of the record. `mfu` is a share of the
            peak of the training's precision in any case.
        code: digests of all code that took its steps or made its initial weights; an empty one
            stands for code that was not noted. See `kvlab.trial.code_identity`.
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
    branched_at: int | None = None
    checkpoint_seconds: float = 0.0
    compile_seconds: float = 0.0
    attention: str | None = None
    products: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    code: list[str] = field(default_factory=lambda: [""])

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        facts = asdict(self)
        products: dict[str, Any] = facts.pop("products")
        return facts | products


def mean_curve(
    losses: Sequence[float], steps: int, batch_tokens: int, points: int | None = None
) -> Curve:
    """Return the training curve.

    Args:
        losses: of every step, in nats per token.
        steps: of the whole training, which set the steps between points.
        batch_tokens: tokens of a step.
        points: about how many; default `CURVE_POINTS`.
    """
    interval = max(1, steps // (points or CURVE_POINTS))
    curve = []
    for start in range(0, len(losses), interval):
        part = losses[start : start + interval]
        step = start + len(part)
        curve.append([step, step * batch_tokens, math.fsum(part) / len(part)])
    return curve


def write_training_record(directory: Path, record: TrainingRecord, fence: Fence | None) -> None:
    """Write ``directory/training.json``, which marks the training as finished.

    It seals the training: it lists size and sha256 of the other files that stay.

    Raises:
        RecordDamaged: One of them is not what was written.
    """
    paths = [directory / name for name in SEALED_FILES if (directory / name).exists()]
    for path in paths:
        if path.suffix == ".json":
            sealed_files.read_seal(path)  # what was damaged meanwhile must not be sealed
    files = {path.relative_to(directory).as_posix(): sealed_files.seal_file(path) for path in paths}
    content = {"schema": 1, **record.as_dict(), "files": files}
    sealed_files.write_sealed_json(directory / "training.json", content, fence=fence)


def write_rung(
    directory: Path, rung: int, step: int, loss: float, fence: Fence | None = None
) -> None:
    """Add the validation loss at a rung of a search to ``directory/rungs.json``.

    Args:
        rung: the step after which the training was to pause.
        step: the step after which it did: later, if an earlier attempt had gone further.
        loss: nats per token.

    Raises:
        RecordDamaged: The file is not what was written.
    """
    path = directory / "rungs.json"
    try:
        rungs = sealed_files.read_sealed_json(path, "rungs")["rungs"]
    except FileNotFoundError:
        rungs = {}
    rungs = {**rungs, str(rung): {"step": step, "loss": loss}}
    sealed_files.write_sealed_json(path, {"schema": 1, "rungs": rungs}, fence=fence)


def load_training_record(directory: str | Path) -> TrainingRecord | None:
    """Return the record of a finished training, or None if ``directory`` has none.

    Raises:
        RecordDamaged: ``training.json`` is damaged.
    """
    try:
        content: dict[str, Any] = sealed_files.read_sealed_json(Path(directory) / "training.json")
    except FileNotFoundError:
        return None
    fields = TrainingRecord.__dataclass_fields__
    known = {key: value for key, value in content.items() if key in fields}
    products = {name: content.get(name) for name in name_members("linear_products")}
    sealed_files.check_form(Path(directory) / "training.json", known, TrainingRecord)
    return TrainingRecord(**known, products=products)
