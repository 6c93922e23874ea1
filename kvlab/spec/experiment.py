"""`experiments/*.yaml`: one complete configuration."""

from pydantic import Field, model_validator

from kvlab.sharing import SharingError, owner_map, tied_slots
from kvlab.spec.benchmark_config import TASK_TOKENS, BenchmarkConfig
from kvlab.spec.data_config import DataConfig
from kvlab.spec.evaluation_config import EvaluationConfig
from kvlab.spec.model_config import ModelConfig
from kvlab.spec.resources_config import ResourcesConfig
from kvlab.spec.serving_config import ServingConfig
from kvlab.spec.spec_model import NAME_PATTERN, SpecModel, raise_problems
from kvlab.spec.training_config import TrainingConfig


class ServedModel(SpecModel):
    """What memory depends on: a model and how it is served."""

    name: str
    model: ModelConfig
    serving: ServingConfig = ServingConfig()

    @model_validator(mode="after")
    def _check(self) -> "ServedModel":
        raise_problems(_tie_problems(self.model, self.serving))
        return self


class Experiment(SpecModel):
    """One complete configuration of everything that a trial does."""

    name: str = Field(pattern=NAME_PATTERN)
    description: str = ""
    model: ModelConfig
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    serving: ServingConfig = ServingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    benchmark: BenchmarkConfig = BenchmarkConfig()
    resources: ResourcesConfig = ResourcesConfig()

    @model_validator(mode="after")
    def _check(self) -> "Experiment":
        problems = [*_size_problems(self), *_training_problems(self)]
        if self.data.mask_documents and self.evaluation.positions:
            text = "asks for the loss by tokens seen, and data.mask_documents hides some of them"
            problems.append(("evaluation.positions", f"{text}; turn one off"))
        raise_problems([*problems, *_tie_problems(self.model, self.serving)])
        return self


def _tie_problems(model: ModelConfig, serving: ServingConfig) -> list[tuple[str, str]]:
    try:
        tie = owner_map(serving.tie, model.layer_kinds)
        tied_slots(model.kv_owners, tie, serving.tie_rule)
    except SharingError as error:
        return [("serving.tie", str(error))]
    return []


def _size_problems(experiment: Experiment) -> list[tuple[str, str]]:
    model, data, bench = experiment.model, experiment.data, experiment.benchmark
    problems = []
    if model.vocab_size < data.vocab_size:
        text = f"is smaller than the {data.vocab_size} tokens of data.tokenizer {data.tokenizer}"
        problems.append(("model.vocab_size", f"{text}; use {data.vocab_size} or more"))
    if bench.prompt_tokens + bench.new_tokens > model.block_size:
        text = f"and prompt_tokens = {bench.prompt_tokens} exceed block_size = {model.block_size}"
        problems.append(("benchmark.new_tokens", f"{text}; shorten one"))
    longest = max(bench.context_lengths, default=0)
    if longest + bench.new_tokens > model.block_size:
        text = f"and new_tokens = {bench.new_tokens} exceed block_size = {model.block_size}"
        problems.append(("benchmark.context_lengths", f"{text}; shorten one"))
    if "task" in bench.parts and model.block_size < TASK_TOKENS:
        text = f"names task, whose {TASK_TOKENS} tokens exceed block_size = {model.block_size}"
        problems.append(("benchmark.parts", f"{text}; leave it out"))
    if "limit" in bench.parts and bench.memory is None and not experiment.resources.devices:
        text = "is not given, and on CPU limit needs to know what it may use"
        problems.append(("benchmark.memory", f"{text}; give bytes, such as 8e9"))
    return problems


def _training_problems(experiment: Experiment) -> list[tuple[str, str]]:
    training, block = experiment.training, experiment.model.block_size
    problems = []
    if training.batch_tokens % block:
        text = f"is not a multiple of block_size = {block}"
        problems.append(
            (
                "training.batch_tokens",
                f"{text}; use {_nearest_multiple(training.batch_tokens, block)}",
            )
        )
    if 0 < training.tokens < training.batch_tokens:
        text = f"is less than one step of batch_tokens = {training.batch_tokens}"
        problems.append(("training.tokens", f"{text}; use 0 to train nothing, or more"))
    workers = experiment.resources.training_workers
    if training.batch_tokens % (block * workers):
        if not training.batch_tokens % block:
            text = f"cannot share batch_tokens = {training.batch_tokens} in rows of"
            field = "gpus" if experiment.resources.workers is None else "workers"
            rule = f"{text} block_size = {block} evenly; use a divisor of"
            rows = training.batch_tokens // block
            problems.append((f"resources.{field}", f"{rule} {rows}, the rows"))
        return problems
    micro, each = experiment.resources.microbatch_tokens, training.batch_tokens // workers
    if micro is not None and (micro % block or each % micro):
        text = f"must be a multiple of block_size = {block} and divide batch_tokens"
        shared = f" / workers = {each}" if workers > 1 else f" = {each}"
        problems.append(("resources.microbatch_tokens", f"{text}{shared}"))
    return problems


def _nearest_multiple(number: int, step: int) -> int:
    return max(step, round(number / step) * step)
