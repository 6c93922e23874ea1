"""`tune` of a sweep: find each architecture's learning rate before the cells are compared.

A recipe that was tuned for the baseline flatters it. Best rates differ by architecture and move
with depth and width (Yang et al. 2022, arXiv 2203.03466), so each one gets its own.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field, ValidationError

from kvlab.errors import Problem
from kvlab.spec import spec_model as spec
from kvlab.spec.experiment import Experiment
from kvlab.spec.seeds_config import Seed
from kvlab.spec.training_config import TrainingConfig
from kvlab.spec.validation_errors import FieldError, list_field_errors

if TYPE_CHECKING:
    from kvlab.spec.sweep import Cell, Sweep

TUNED_KEY = "training.learning_rate"
"""The setting that can be tuned."""


def _check_rising(rates: tuple[float, ...]) -> tuple[float, ...]:
    if any(high <= low for low, high in pairwise(rates)):
        spec.raise_problems([("", "is not rising; write each rate once, the lowest first")])
    return rates


Rate = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Rates = Annotated[spec.TupleOf[Rate], Field(min_length=3), AfterValidator(_check_rising)]


class TuneConfig(spec.SpecModel):
    """`tune`: train every architecture at each rate, and use the best.

    The best rate is the vertex of a parabola in the logarithm of the rate; see
    `kvlab.extensions.tuning.optimum`. Cells that differ in serving alone share it.
    """

    learning_rates: Rates = Field(alias=TUNED_KEY)
    """At least three rates, rising. Unit: none. Example: [0.001, 0.002, 0.004]"""
    seeds: Annotated[spec.TupleOf[Seed], Field(min_length=1), spec.once("a seed")] = (100, 101, 102)
    """Seeds of the tuning alone: none of the sweep's own. With fewer than three, one training that
    goes wrong moves the rate.
    Example: [100, 101, 102]"""
    tokens: spec.PositiveInt | None = None
    """Train fewer tokens than the cells do. Unit: tokens. Default: training.tokens. Example: 1e6"""
    share: spec.TupleOf[spec.Name] = ()
    """Factors that share a rate: cells that differ in them alone are tuned once, in the first of
    them.
    Example: [position]"""


class TuneFields(spec.SpecModel):
    """What a sweep gets."""

    tune: TuneConfig | None = None
    """Find each architecture's learning rate first.
    Default: none. Example: {training.learning_rate: [0.001, 0.002, 0.004], seeds: [100, 101]}"""


def find_sweep_problems(sweep: "Sweep") -> spec.Problems:
    """Yield what `tune` and other keys of a sweep cannot mean together."""
    tune = TuneFields.of(sweep).tune
    if tune is None:
        return
    if shared := sorted(set(tune.seeds) & set(sweep.all_seeds)):
        text = f"has {', '.join(map(str, shared))} in common with the seeds of the cells, which"
        yield "tune.seeds", f"{text} would then be compared where they were tuned; use others"
    for factor in tune.share:
        if factor not in sweep.factors:
            text = f"names {factor}, which is not a factor; use {', '.join(sweep.factors)}"
            yield "tune.share", text


def is_tuned(cell: "Cell") -> bool:
    """Return whether `tune` finds the rate of a cell.

    One that goes on from the weights of another cell has the rate that its levels write.
    """
    return not isinstance(cell.experiment.training.init_from, dict)


def with_learning_rate(
    experiment: Experiment, rate: float, tokens: int | None = None
) -> Experiment:
    """Return an experiment with another learning rate, and what is derived from it."""
    data = experiment.training.model_dump(exclude_unset=True) | {"learning_rate": rate}
    if tokens is not None:
        data["tokens"] = tokens
    return experiment.model_copy(update={"training": TrainingConfig.model_validate(data)})


def find_cell_problems(sweep: "Sweep", cell: "Cell") -> Iterator[Problem]:
    """Yield why the learning rate of a cell cannot be tuned."""
    tune, training = TuneFields.of(sweep).tune, cell.experiment.training
    if tune is None or not is_tuned(cell):
        return
    document = sweep.source.document
    for factor, level in cell.levels.items():
        if TUNED_KEY in sweep.factors[factor][level]:
            rate = f"{TUNED_KEY} = {training.learning_rate:g}"
            text = f"{rate} is set by a level, and tune sets it; remove one"
            yield document.problem(("factors", factor, level, TUNED_KEY), text)
    if not training.steps:
        text = f"training.tokens = {training.tokens} trains nothing, so no rate is better"
        error = FieldError(("training", "tokens"), f"{text}; remove tune")
        yield sweep.locate(error, cell.levels)
    elif text := _find_token_problem(tune.tokens, cell.experiment):
        yield document.problem(("tune", "tokens"), f"tune.tokens = {tune.tokens} {text}")


def _find_token_problem(tokens: int | None, experiment: Experiment) -> str:
    """Return why a cell cannot be tuned with these tokens; empty if it can."""
    training = experiment.training
    if tokens is None:
        return ""
    if tokens >= training.tokens:
        return f"is not below training.tokens = {training.tokens}; leave it out to train as many"
    if tokens < training.batch_tokens:
        return f"is less than a step of training.batch_tokens = {training.batch_tokens}"
    try:
        with_learning_rate(experiment, training.learning_rate, tokens)
    except ValidationError as error:
        reason = list_field_errors(error, TrainingConfig, {"tokens": tokens})[0].message
        return f"does not fit the recipe: {reason}"
    return ""
