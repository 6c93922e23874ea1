"""What the text must hold for an experiment: too few tokens are found before the first trial.

A token count that the spec states is a request: if the text holds less, the sweep is refused, at
the key. A token count that is a default is lowered to what the held-out text holds. The result
depends on the experiment and the numbers of tokens alone, and equals the default on ample text, so
ids do not depend on who asks.
"""

from collections.abc import Iterator
from dataclasses import replace

from kvlab.data.shards import DatasetFacts
from kvlab.own_extensions import find_members
from kvlab.spec.benchmark_config import TASK_PROMPT_TOKENS
from kvlab.spec.experiment import Experiment

WINDOW_MULTIPLE = 2
"""Length of the windows of the loss by position in trained lengths, if the model allows it."""


Shortage = tuple[str, str]
"""A key that asks for more text than there is, such as ``training.evaluate_tokens``, and the whole
line: the key, its value, what is held, what is required, what to do."""


def position_loss_windows(experiment: Experiment) -> tuple[int, int]:
    """Return the validation tokens of the loss by position, and the length of its windows."""
    model, config = experiment.model, experiment.evaluation
    tokens = (config.served and config.served_tokens) or config.loss_tokens
    # position embeddings end with the trained length
    multiple = 1 if model.position_scheme.has_embedding else WINDOW_MULTIPLE
    return tokens, multiple * model.block_size


def _largest_count(held: int, length: int) -> int:
    """Return the tokens of the most windows of a text, each followed by the target of its last."""
    return max(0, held - 1) // length * length


def _fit_shares(experiment: Experiment, facts: DatasetFacts) -> DatasetFacts:
    """Return the facts of a text of which every part is to have its share of the windows.

    The shortest part of the training text is read again soonest; held out, none is read twice.
    """
    if not facts.parts:
        return facts
    parts, block = experiment.data.parts, experiment.model.block_size
    total = sum(part.weight for part in parts)
    held = min(
        # at most one window more than its share, and the target of the last
        max(0, held_out - block) * total // part.weight
        for part, (_, held_out) in zip(parts, facts.parts, strict=True)
    )
    train = min(training for training, _ in facts.parts)
    return replace(facts, training_tokens=train, held_out_tokens=held)


def scale_defaults(experiment: Experiment, facts: DatasetFacts) -> tuple[Experiment, str | None]:
    """Return an experiment whose default token counts fit the held-out text, and a note.

    Counts that the spec states are left as they are; see `find_shortages`. Nor is a count lowered
    if the text has not even one window.

    Returns:
        The experiment itself and None if its counts fit.
    """
    facts = _fit_shares(experiment, facts)
    block, held = experiment.model.block_size, facts.held_out_tokens
    training, evaluation = experiment.training, experiment.evaluation
    lowered: dict[str, int] = {}
    if training.steps and "evaluate_tokens" not in training.model_fields_set:
        largest = _largest_count(held, block)
        if 0 < largest < training.evaluate_tokens:
            lowered["training.evaluate_tokens"] = largest
            training = training.model_copy(update={"evaluate_tokens": largest})
    if "loss_tokens" not in evaluation.model_fields_set and evaluation.loss_bytes is None:
        tokens, length = position_loss_windows(experiment)
        is_by_position = evaluation.positions and tokens == evaluation.loss_tokens
        scored = held // (evaluation.text_parts or 1)
        largest = _largest_count(scored, length if is_by_position else block)
        if 0 < largest < evaluation.loss_tokens:
            lowered["evaluation.loss_tokens"] = largest
            evaluation = evaluation.model_copy(update={"loss_tokens": largest})
    if not lowered:
        return experiment, None
    changed = {"training": training, "evaluation": evaluation}
    counts = " and ".join(f"{key} = {count:,}" for key, count in lowered.items())
    note = f"the text has {held:,} held-out tokens, so {counts}, less than by default"
    return experiment.model_copy(update=changed), note


def find_shortages(experiment: Experiment, facts: DatasetFacts) -> Iterator[Shortage]:
    """Yield every key that asks for more text than the dataset holds."""
    facts = _fit_shares(experiment, facts)
    block, train = experiment.model.block_size, facts.training_tokens
    if experiment.training.steps and train <= block:
        text = f"model.block_size = {block} needs {block + 1:,} training tokens, and the text has"
        yield "model.block_size", f"{text} {train:,}; lower it or give more text"
    if "task" in experiment.benchmark.parts and train <= TASK_PROMPT_TOKENS:
        text = f"benchmark.parts names task, which needs {TASK_PROMPT_TOKENS + 1} training tokens"
        yield "benchmark.parts", f"{text}, and it has {train:,}; leave it out or give more text"
    for key, value, tokens, length in list_window_requests(experiment):
        required = -(-tokens // length) * length + 1  # whole windows, and the target of the last
        parts = 1 if key.startswith("training") else experiment.evaluation.text_parts or 1
        held = facts.held_out_tokens // parts
        if required > held:
            largest = _largest_count(held, length)
            yield _held_out_shortage(key, value, required, held, largest=largest, parts=parts)
    parts, wanted = experiment.evaluation.text_parts or 1, experiment.evaluation.loss_bytes
    if wanted is not None and wanted > (held := facts.held_out_bytes // parts):
        key = "evaluation.loss_bytes"
        yield _held_out_shortage(key, wanted, wanted, held, "bytes", largest=held, parts=parts)
    for name, options in experiment.benchmark.list_options():
        need = options.find_text_need(block)
        if need is not None and need.tokens > facts.held_out_tokens:
            key = f"benchmark.{name}.{need.key}"
            yield _held_out_shortage(key, need.value, need.tokens, facts.held_out_tokens)


def _held_out_shortage(
    key: str,
    value: object,
    required: int,
    held: int,
    unit: str = "tokens",
    *,
    largest: int = 0,
    parts: int = 1,
) -> Shortage:
    hint = f"use {largest:,} or less, " if largest and isinstance(value, int) else ""
    holder = "the text has" if parts == 1 else f"each of its {parts} parts has about"
    text = f"{key} = {value} needs {required:,} held-out {unit}, and {holder} {held:,}"
    return key, f"{text}; {hint}raise data.validation_fraction or give more text"


def list_window_requests(experiment: Experiment) -> Iterator[tuple[str, object, int, int]]:
    """Yield the keys that ask for windows of held-out text: value, tokens, tokens of a window."""
    training, evaluation = experiment.training, experiment.evaluation
    block = experiment.model.block_size
    if training.steps:
        count = training.evaluate_tokens
        yield "training.evaluate_tokens", count, count, block
    if evaluation.loss_bytes is None:
        yield "evaluation.loss_tokens", evaluation.loss_tokens, evaluation.loss_tokens, block
        served = evaluation.served_tokens if evaluation.served else None
        if served is not None:
            yield "evaluation.served_tokens", served, served, block
    if evaluation.positions:
        yield "evaluation.positions", "true", *position_loss_windows(experiment)
    for list_requests in find_members("text_requests").values():
        yield from list_requests(experiment)
