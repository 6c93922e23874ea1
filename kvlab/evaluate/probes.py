"""The probes of one model, one-shot and through the serving cache."""

from collections.abc import Callable

from kvlab.evaluate.loss import Tokens
from kvlab.evaluate.positions import position_losses, position_measurements
from kvlab.evaluate.recall import recall_measurements, recall_rows, recalled
from kvlab.evaluate.served import Tick
from kvlab.model import GPT
from kvlab.spec.experiment import Experiment
from kvlab.spec.parts import ServingConfig

BEYOND = 2
"""Where positions allow it, loss by position reads windows of this many trained lengths."""

MakeTick = Callable[[str, int], Tick]
"""From a note for a person and the number of tokens to come, what counts them."""


def probe(
    model: GPT, validation: Tokens, experiment: Experiment, progress: MakeTick
) -> dict[str, float | int]:
    """Measures the probes that ``experiment.evaluation`` asks for.

    Raises:
        DataError: too few validation tokens.
    """
    wanted = experiment.evaluation
    ways: list[tuple[str, ServingConfig | None]] = [("", None)]
    if wanted.served:
        ways.append(("_served", experiment.serving))
    found: dict[str, float | int] = {}
    if wanted.recall:
        block = model.config.block_size
        rows = recall_rows(wanted.recall, block, experiment.data.vocab_size - 1)
        tick = progress("associative recall", rows.tokens.size * len(ways))
        found |= {"recall_rows": wanted.recall, "recall_pairs": rows.pairs}
        for ending, serving in ways:
            found |= recall_measurements(rows, recalled(model, rows, serving, tick), ending)
    if wanted.positions:
        found |= _positions(model, validation, experiment, ways, progress)
    return found


def position_windows(experiment: Experiment) -> tuple[int, int]:
    """Validation tokens of the loss by position, and the length of its windows."""
    model, wanted = experiment.model, experiment.evaluation
    tokens = (wanted.served and wanted.served_tokens) or wanted.loss_tokens
    # learned positions end with the trained length
    return tokens, model.block_size * (1 if model.position == "learned" else BEYOND)


def _positions(
    model: GPT,
    validation: Tokens,
    experiment: Experiment,
    ways: list[tuple[str, ServingConfig | None]],
    progress: MakeTick,
) -> dict[str, float]:
    block = model.config.block_size
    tokens, length = position_windows(experiment)
    tick = progress("loss by position", -(-tokens // length) * length * len(ways))
    found: dict[str, float] = {}
    for ending, serving in ways:
        losses = position_losses(model, validation, tokens, length, serving, tick)
        found |= position_measurements(losses, block, ending)
    return found
