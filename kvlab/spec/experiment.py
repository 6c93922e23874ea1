"""`experiments/*.yaml`: one complete configuration."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pydantic import ValidationInfo, field_validator, model_validator

from kvlab.errors import PretrainedError
from kvlab.own_extensions import find_members, find_problems
from kvlab.sharing import SharingError
from kvlab.spec.benchmark_config import TASK_TOKENS, BenchmarkConfig
from kvlab.spec.data_config import DataConfig
from kvlab.spec.dtypes import MODEL_DTYPE
from kvlab.spec.evaluation_config import EvaluationConfig
from kvlab.spec.extension_files import ExtensionFile, Extensions, load_extension, offer_extensions
from kvlab.spec.model_config import ModelConfig
from kvlab.spec.resources_config import ResourcesConfig
from kvlab.spec.serving_config import ServingConfig
from kvlab.spec.spec_model import Name, Problems, SpecModel
from kvlab.spec.token_metrics import TokenMetric
from kvlab.spec.training_config import TrainingConfig

_OF_SYMBOLS = ("loss_tokens", "served", "served_tokens", "precision")
"""Keys of `evaluation` that hold for symbols, too; what the others ask for is measured on text."""


class ServedModel(SpecModel):
    """A model and how it is served: all that memory depends on."""

    name: str
    model: ModelConfig
    serving: ServingConfig = ServingConfig()

    def _find_problems(self) -> Problems:
        return _find_serving_problems(self.model, self.serving)


class Experiment(SpecModel):
    """One complete configuration of everything that a trial does."""

    name: Name
    """Name of the experiment. Example: small"""
    description: str = ""
    """What it is, for people. Example: A tiny GPT on bytes."""
    extensions: Extensions = ()
    """Python files, beside this one, that add values of other keys, such as a form of K/V.
    Example: []"""
    model: ModelConfig
    """The shape of the transformer. Example: {preset: gpt2}"""
    data: DataConfig = DataConfig()
    """Which text, and how it becomes tokens. Example: {tokenizer: bytes}"""
    training: TrainingConfig = TrainingConfig()
    """The recipe. Example: {tokens: 1e7}"""
    serving: ServingConfig = ServingConfig()
    """What changes only inference. Example: {kv_dtype: int8}"""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Which qualities are measured, and on how much. Example: {loss_tokens: 32768}"""
    benchmark: BenchmarkConfig = BenchmarkConfig()
    """Memory and decode speed. Example: {prompt_tokens: 96}"""
    resources: ResourcesConfig = ResourcesConfig()
    """Where a trial runs. Example: {cpus: 2}"""

    @model_validator(mode="wrap")
    @classmethod
    def _offer_extensions(cls, data: Any, handler: Callable[[Any], "Experiment"]) -> "Experiment":
        with offer_extensions(data):
            return handler(data)

    @field_validator("training", "benchmark")
    @classmethod
    def _fit_defaults(cls, section: Any, info: ValidationInfo) -> Any:
        """Return a section whose default lengths fit the model's ``block_size``."""
        if "model" not in info.data:  # it is wrong
            return section
        block_size, written = info.data["model"].block_size, section.model_fields_set
        fitted = {}
        if isinstance(section, TrainingConfig):
            fitted["batch_tokens"] = max(1, section.batch_tokens // block_size) * block_size
        else:
            prompt, new = section.prompt_tokens, section.new_tokens
            half = block_size - prompt if "prompt_tokens" in written else block_size // 2
            fitted["new_tokens"] = new = new if "new_tokens" in written else max(1, min(new, half))
            fitted["prompt_tokens"] = max(1, min(prompt, block_size - new))
        return section.model_copy(update={k: n for k, n in fitted.items() if k not in written})

    @property
    def token_metrics(self) -> dict[TokenMetric, ExtensionFile]:
        """The metrics of the files of ``extensions``, with their file."""
        added = ((one, file) for file in self.extensions for one in load_extension(file).members)
        return {one: file for one, file in added if isinstance(one, TokenMetric)}

    def weight_dtype(self, device_type: str) -> str:
        """Return the dtype of the weights that are evaluated and benchmarked on a device."""
        if device_type != "cuda" or self.evaluation.precision == "float32":
            return MODEL_DTYPE
        return self.training.precision

    def _find_problems(self) -> Problems:
        model, data = self.model, self.data
        with suppress(PretrainedError):  # a checkpoint's tokenizer is not on this machine
            if model.vocab_size < (size := data.vocab_size):
                is_one = size == data.vocabulary.size
                whose = "data.tokenizer" if is_one else "data.source"
                whose = f"{whose} {data.tokenizer if is_one else data.source}"
                text = f"is smaller than the {size} tokens of {whose}"
                yield "model.vocab_size", f"{text}; use {size} or more"
        if data.mask_documents and self.evaluation.positions:
            text = "measures the loss by tokens seen, of which data.mask_documents hides some"
            yield "evaluation.positions", f"{text}; turn one off"
        yield from self._find_symbol_problems()
        yield from self._find_benchmark_problems()
        yield from self._find_training_problems()
        yield from self.training.kv.find_storage_problems(model, "training")
        yield from _find_serving_problems(model, self.serving)
        yield from find_problems(self)

    def _find_symbol_problems(self) -> Problems:
        """Yield what a source that makes its own tokens cannot give: windows, and words."""
        options, evaluation = self.data.symbol_options, self.evaluation
        if options is None:
            return
        length, block_size = options.document_tokens, self.model.block_size
        source = f"of data.source {self.data.source}"
        if block_size % length:
            text = f"is not a multiple of the {length} tokens of a document {source}"
            yield "model.block_size", f"{text}; use {-(-block_size // length) * length}"
        for key in type(evaluation).model_fields:
            if key not in _OF_SYMBOLS and getattr(evaluation, key) not in ("none", 0, None, ()):
                text = f"is measured on text, and the documents {source} are symbols"
                yield f"evaluation.{key}", f"{text}; leave it out"

    def _find_benchmark_problems(self) -> Problems:
        bench, block_size = self.benchmark, self.model.block_size
        if bench.prompt_tokens + bench.new_tokens > block_size:
            text = f"and prompt_tokens = {bench.prompt_tokens} exceed block_size = {block_size}"
            yield "benchmark.new_tokens", f"{text}; shorten one"
        if bench.context_lengths and max(bench.context_lengths) + bench.new_tokens > block_size:
            text = f"and new_tokens = {bench.new_tokens} exceed block_size = {block_size}"
            yield "benchmark.context_lengths", f"{text}; shorten one"
        if "task" in bench.parts and block_size < TASK_TOKENS:
            text = f"tokens exceed block_size = {block_size}; leave it out"
            yield "benchmark.parts", f"names task, whose {TASK_TOKENS} {text}"
        for name, options in bench.list_options():
            for field, text in options.find_length_problems(block_size):
                yield f"benchmark.{name}.{field}", text

    def _find_training_problems(self) -> Problems:
        training, block_size = self.training, self.model.block_size
        if training.batch_tokens % block_size:
            nearest = max(1, round(training.batch_tokens / block_size)) * block_size
            text = f"is not a multiple of block_size = {block_size}"
            yield "training.batch_tokens", f"{text}; use {nearest}"
        if 0 < training.tokens < training.batch_tokens:
            text = f"is less than one step of batch_tokens = {training.batch_tokens}"
            yield "training.tokens", f"{text}; use 0 to train nothing, or more"
        workers = self.resources.training_workers
        rows = training.batch_tokens // block_size
        if not training.batch_tokens % block_size and rows % workers:
            text = f"cannot divide batch_tokens = {training.batch_tokens} into equal numbers of"
            field = "gpus" if self.resources.workers is None else "workers"
            hint = f"use a divisor of {rows}, the number of rows"
            yield f"resources.{field}", f"{text} rows of block_size = {block_size}; {hint}"
        if training.batch_tokens % (block_size * workers):
            return
        microbatch = self.resources.microbatch_tokens
        worker_tokens = training.batch_tokens // workers
        if microbatch is not None and (microbatch % block_size or worker_tokens % microbatch):
            text = f"must be a multiple of block_size = {block_size} and divide batch_tokens"
            quotient = f" / workers = {worker_tokens}" if workers > 1 else f" = {worker_tokens}"
            yield "resources.microbatch_tokens", f"{text}{quotient}"


def _find_serving_problems(model: ModelConfig, serving: ServingConfig) -> Problems:
    try:
        slots = serving.find_slots(model)
    except SharingError as error:
        yield "serving.tie", str(error)
    else:
        for find in find_members("serving_problems").values():
            yield from find(model, serving)
        if message := model.describe_shared_state(slots):
            yield "serving.tie", message
    if serving.compile and not all(layer.stores_tokens for layer in model.layers):
        text = "runs a step several times before it counts, which would change a layer's state"
        yield "serving.compile", f"{text}; leave it out, or use a pattern of G and L alone"
    yield from serving.kv.find_storage_problems(model, "serving")
