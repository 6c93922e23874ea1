"""What the text must hold for an experiment: too few tokens are found before the first trial.

A token count that the spec states is a request: if the text holds less, the sweep is refused, at
the key. A token count that is a default is lowered to what the held-out text holds. The result
depends on the experiment and the numbers of tokens alone, and equals the default on ample text, so
ids do not depend on who asks.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kvlab.data.shards import DatasetFacts
from kvlab.spec.benchmark_config import TASK_PROMPT_TOKENS
from kvlab.spec.experiment import Experiment

WINDOW_MULTIPLE = 2
"""Length of the windows of the loss by position in trained lengths, if the model allows it."""


class Shortage(NamedTuple):
    """A key that asks for more text than there is.

    Attributes:
        key: Dotted, such as ``training.evaluate_tokens``.
        message: The whole line: the key, its value, what is held, what is required, what to do.
    """

    key: str
    message: str


class _Request(NamedTuple):
    """Windows of held-out text that a key asks for."""

    key: str
    value: object
    tokens: int
    length: int

    @property
    def required(self) -> int:
        """The tokens of whole windows, and the target of the last."""
        return -(-self.tokens // self.length) * self.length + 1


def position_loss_windows(experiment: Experiment) -> tuple[int, int]:
    """Return the validation tokens of the loss by position, and the length of its windows."""
    model, config = experiment.model, experiment.evaluation
    tokens = (config.served and config.served_tokens) or config.loss_tokens
    # position embeddings end with the trained length
    multiple = 1 if model.position_scheme.has_embedding else WINDOW_MULTIPLE
    return tokens, multiple * model.block_size


def scale_defaults(experiment: Experiment, facts: DatasetFacts) -> tuple[Experiment, str | None]:
    """Return an experiment whose default token counts fit the held-out text, and a note.

    Counts that the spec states are left as they are; see `find_shortages`. Nor is a count lowered
    if the text has not even one window.

    Returns:
        The experiment itself and None if its counts fit.
    """
    block, held = experiment.model.block_size, facts.held_out_tokens
    training, evaluation = experiment.training, experiment.evaluation
    lowered: dict[str, int] = {}
    if training.steps and "evaluate_tokens" not in training.model_fields_set:
        largest = _largest_count(training.evaluate_tokens, held, block)
        if largest:
            lowered["training.evaluate_tokens"] = largest
            training = training.model_copy(update={"evaluate_tokens": largest})
    if "loss_tokens" not in evaluation.model_fields_set and evaluation.loss_bytes is None:
        tokens, length = position_loss_windows(experiment)
        is_by_position = evaluation.positions and tokens == evaluation.loss_tokens
        unit = length if is_by_position else block
        largest = _largest_count(evaluation.loss_tokens, held, unit)
        if largest:
            lowered["evaluation.loss_tokens"] = largest
            evaluation = evaluation.model_copy(update={"loss_tokens": largest})
    if not lowered:
        return experiment, None
    changed = {"training": training, "evaluation": evaluation}
    counts = " and ".join(f"{key} = {count:,}" for key, count in lowered.items())
    verb = "is lowered from its default" if len(lowered) == 1 else "are lowered from their defaults"
    note = f"the text has {held:,} held-out tokens, so {counts} {verb}"
    return experiment.model_copy(update=changed), note


def _largest_count(count: int, held: int, length: int) -> int | None:
    """Return the tokens of the most windows that a text has; None if it has ``count``, or none."""
    largest = _count_windows(held, length) * length
    return largest if 0 < largest < count else None


def _count_windows(held: int, length: int) -> int:
    """Return how many windows a text has, each followed by the target of its last token."""
    return max(0, held - 1) // length


def find_shortages(experiment: Experiment, facts: DatasetFacts) -> Iterator[Shortage]:
    """Yield every key that asks for more text than the dataset holds.

    Args:
        experiment: From `scale_defaults`.
    """
    yield from _find_training_shortages(experiment, facts.training_tokens)
    held = facts.held_out_tokens
    for request in _list_requests(experiment):
        if request.required > held:
            yield Shortage(request.key, _describe_shortage(request, held))
    wanted = experiment.evaluation.loss_bytes
    if wanted is not None and wanted > facts.held_out_bytes:
        text = f"evaluation.loss_bytes = {wanted} needs {wanted:,} bytes of held-out text, and the"
        hint = f"use {facts.held_out_bytes:,} or less, {_MORE_HELD_OUT}"
        message = f"{text} text has {facts.held_out_bytes:,}; {hint}"
        yield Shortage("evaluation.loss_bytes", message)
    yield from _find_load_shortages(experiment, held)


def _find_load_shortages(experiment: Experiment, held: int) -> Iterator[Shortage]:
    load = experiment.benchmark.conversations
    required = 0 if load is None else load.count_text_tokens(experiment.model.block_size)
    if load is not None and required > held:
        name, value = ("count", load.count) if load.trace is None else ("trace", load.trace)
        key = f"benchmark.conversations.{name}"
        text = f"{key} = {value} needs {required:,} held-out tokens, so that each stretch of text"
        text = f"{text} begins at a place of its own, and the text has {held:,}"
        text = f"{text}; use fewer, {_MORE_HELD_OUT}"
        yield Shortage(key, text)


_MORE_HELD_OUT = "raise data.validation_fraction or give more text"


def _find_training_shortages(experiment: Experiment, held: int) -> Iterator[Shortage]:
    block = experiment.model.block_size
    if experiment.training.steps and held <= block:
        text = f"model.block_size = {block} needs {block + 1:,} training tokens, and the text has"
        yield Shortage("model.block_size", f"{text} {held:,}; lower it or give more text")
    if "task" in experiment.benchmark.parts and held <= TASK_PROMPT_TOKENS:
        text = f"benchmark.parts names task, which needs {TASK_PROMPT_TOKENS + 1} training tokens"
        message = f"{text}, and the text has {held:,}; leave it out or give more text"
        yield Shortage("benchmark.parts", message)


def _list_requests(experiment: Experiment) -> Iterator[_Request]:
    evaluation, block = experiment.evaluation, experiment.model.block_size
    count = experiment.training.evaluate_tokens
    if experiment.training.steps:
        yield _Request("training.evaluate_tokens", count, count, block)
    if evaluation.loss_bytes is None:
        count = evaluation.loss_tokens
        yield _Request("evaluation.loss_tokens", count, count, block)
        if evaluation.served and evaluation.served_tokens is not None:
            count = evaluation.served_tokens
            yield _Request("evaluation.served_tokens", count, count, block)
    if evaluation.positions:
        yield _Request("evaluation.positions", "true", *position_loss_windows(experiment))
    if evaluation.needle is not None:
        lengths = evaluation.needle.lengths
        yield _Request("evaluation.needle.lengths", list(lengths), lengths[-1], lengths[-1])


def _describe_shortage(request: _Request, held: int) -> str:
    text = f"{request.key} = {request.value} needs {request.required:,} held-out tokens"
    largest = _count_windows(held, request.length) * request.length
    if request.key == "evaluation.positions":
        text += f" (windows of {request.length:,} for {request.tokens:,} tokens)"
        hint = f"score {largest:,} tokens or less, " if largest else "turn it off, "
    elif request.key == "evaluation.needle.lengths":
        hint = f"use lengths below {held:,}, "
    else:
        hint = f"use {largest:,} or less, " if largest else "use a smaller model.block_size, "
    return f"{text}, and the text has {held:,}; {hint}{_MORE_HELD_OUT}"
