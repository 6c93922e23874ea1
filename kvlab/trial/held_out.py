"""Whether the held-out text suffices for what a trial asks of it: known before it trains."""

from kvlab.data import validation_batches
from kvlab.evaluate.loss import Tokens
from kvlab.evaluate.probes import position_windows
from kvlab.spec.experiment import Experiment


def check_held_out(tokens: Tokens, experiment: Experiment) -> None:
    """Refuses what training or evaluation would, at its end, find too short.

    Args:
        tokens: held-out ids, (tokens,).

    Raises:
        DataError: there are too few.
    """
    evaluation, block = experiment.evaluation, experiment.model.block_size
    wanted = [(evaluation.loss_tokens, block)]
    if evaluation.served and evaluation.served_tokens:
        wanted.append((evaluation.served_tokens, block))
    if evaluation.positions:
        wanted.append(position_windows(experiment))
    if experiment.training.steps:
        wanted.append((experiment.training.evaluate_tokens, block))
    for count, length in wanted:  # refuses at once, reads nothing yet
        validation_batches(tokens, tokens_wanted=count, block_size=length, batch_size=1)
