"""`training` of an experiment: the recipe."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvlab.spec.dtypes import MIN_GROUP, list_kv_dtypes
from kvlab.spec.kv_storage import KVStorage
from kvlab.spec.model_config import ModelConfig
from kvlab.spec.spec_model import (
    DecayRate,
    NonNegativeInt,
    OneOf,
    PositiveFloat,
    PositiveInt,
    SpecModel,
    TupleOf,
    example,
    normalize_level_name,
    raise_problems,
)


def _validate_init_from(value: Any) -> Any:
    if isinstance(value, dict) and value:
        value = {factor: normalize_level_name(level) for factor, level in value.items()}
        if all(isinstance(level, str) for level in value.values()):
            return value
    elif value is None or (isinstance(value, str) and value):
        return value
    text = "is not a folder, a repository or factor levels; write one such as ./weights,"
    raise PydanticCustomError("start", f"{text} openai-community/gpt2 or {{heads: mha}}")


Int8Product = Literal["output", "grad_input", "grad_weight"]
INT8_PRODUCTS: tuple[Int8Product, ...] = get_args(Int8Product)
"""The matrix products of a linear layer that trains."""


def _order_products(value: tuple[Int8Product, ...]) -> tuple[Int8Product, ...]:
    if len(set(value)) < len(value):
        raise PydanticCustomError("twice", "names a product twice; name each once")
    return tuple(name for name in INT8_PRODUCTS if name in value)


InitFrom = Annotated[str | dict[str, str] | None, BeforeValidator(_validate_init_from)]


class TrainingConfig(SpecModel):
    """`training`: the recipe. AdamW, warm-up, then cosine or wsd to ``final_learning_rate``.

    A step is ``batch_tokens`` tokens; the number of steps is ``tokens // batch_tokens``.
    ``init_from`` names the first weights instead of drawing them: a published checkpoint, or
    another cell of the sweep, as the levels in which it differs (uptraining).
    """

    excluded_from_identity: ClassVar[frozenset[str]] = frozenset(
        {"checkpoint_every", "keep_last", "keep_best", "init_from"}
    )
    # `kvlab.trial.initial_weights` adds the contents of init_from
    omitted_defaults: ClassVar[Mapping[str, Any]] = {
        "residual": "float32",
        "int8": [],
        "kv_dtype": "model",
        "kv_group": None,
        "kv_residual": None,
    }

    tokens: Annotated[NonNegativeInt, example(1e10, "tokens")] = 0
    """Tokens seen in training; 0 trains nothing."""
    init_from: Annotated[InitFrom, example("openai-community/gpt2", default="freshly drawn")] = None
    """First weights: a Hugging Face folder or repository, or the training of another cell, as in
    {heads: mha}."""
    batch_tokens: Annotated[PositiveInt, example(524288, "tokens")] = 8192
    """Tokens of an optimizer step."""
    learning_rate: Annotated[PositiveFloat, example(0.001, "none")] = 6e-4
    """Peak learning rate, at the end of the warm-up."""
    final_learning_rate: Annotated[
        Annotated[float, Field(ge=0.0)] | None,
        example(0.0001, "none", default="learning_rate / 10"),
    ] = Field(default=None, validate_default=True)
    """Learning rate at the end of the schedule."""
    schedule: Annotated[Literal["cosine", "wsd"], example("wsd")] = "cosine"
    """After warm-up: half a cosine, or wsd: stable, then a decay at the end."""
    decay_tokens: Annotated[
        PositiveInt | None,
        example(2e9, "tokens", default="20% of tokens under wsd", schedule="wsd", tokens=1e10),
    ] = Field(default=None, validate_default=True)
    """Length of the decay of schedule: wsd, at the end of training."""
    warmup_tokens: Annotated[
        NonNegativeInt | None, example(3.75e8, "tokens", default="4% of tokens", tokens=1e10)
    ] = Field(default=None, validate_default=True)
    """Linear warm-up. Under wsd, token budgets of equal warm-up share their stable phase."""
    weight_decay: Annotated[float, Field(ge=0.0), example(0.05, "none")] = 0.1
    """Decoupled weight decay of AdamW (arXiv 1711.05101), on matrices only."""
    beta1: Annotated[DecayRate, example(0.95, "none")] = 0.9
    """Decay rate of AdamW's mean of gradients."""
    beta2: Annotated[DecayRate, example(0.99, "none")] = 0.95
    """Decay rate of AdamW's mean of squared gradients."""
    adam_eps: Annotated[PositiveFloat, example(1e-07, "none")] = 1e-8
    """Added to the denominator of AdamW's step."""
    clip: Annotated[PositiveFloat, example(0.5, "none")] = 1.0
    """Largest norm of the gradient."""
    spike: Annotated[PositiveFloat | None, example(2.0, "nats/token")] = 1.0
    """The training has diverged once the mean loss of 32 steps is this many nats above the lowest
    such mean; null: never."""
    precision: Annotated[Literal["float32", "bfloat16"], example("bfloat16")] = "float32"
    """Of the matrix products; weights and optimizer stay in float32."""
    residual: Annotated[
        Literal["float32", "bfloat16"], example("bfloat16", precision="bfloat16")
    ] = "float32"
    """Of the residual stream, which every layer reads and adds to, under precision: bfloat16.
    bfloat16 moves and keeps half the bytes, and rounds each sum."""
    int8: Annotated[
        TupleOf[Int8Product],
        AfterValidator(_order_products),
        example(["output", "grad_input", "grad_weight"]),
    ] = ()
    """Products of the linear layers of attention and MLPs that are in int8, with a scale for each
    row and column that is found anew in each pass; embeddings and head are left out. [output,
    grad_input] is SwitchBack (arXiv 2304.13013)."""
    kv_dtype: Annotated[str, OneOf(list_kv_dtypes), example("int8")] = "model"
    """The forward pass reads K/V as a cache of this serving.kv_dtype would give them back;
    gradients pass straight through. Without it they are not rounded."""
    kv_group: Annotated[
        Annotated[PositiveInt, Field(ge=MIN_GROUP)] | None,
        example(
            16, "numbers", default="that of serving.kv_group in the same kv_dtype", kv_dtype="int4"
        ),
    ] = None
    """As serving.kv_group, of training.kv_dtype. It does not follow serving's."""
    kv_residual: Annotated[
        NonNegativeInt | None,
        example(64, "tokens", default="128 for kivi4 and kivi2", kv_dtype="kivi2"),
    ] = None
    """As serving.kv_residual, of training.kv_dtype. It does not follow serving's."""
    compile: Annotated[bool, example(True)] = False
    """torch.compile the model."""
    evaluate_every: Annotated[PositiveInt, example(250, "steps")] = 100
    """Steps between validation losses."""
    evaluate_tokens: Annotated[PositiveInt, example(8192, "tokens")] = 65_536
    """Validation tokens of each of those losses."""
    checkpoint_every: Annotated[
        PositiveInt | None, example(500, "steps", default="ten minutes")
    ] = None
    """Steps between checkpoints. Without it ten minutes, or twenty times as long as writing one
    takes."""
    keep_last: Annotated[PositiveInt, example(3, "checkpoints")] = 2
    """Newest checkpoints kept while training."""
    keep_best: Annotated[NonNegativeInt, example(1, "checkpoints")] = 0
    """Checkpoints of lowest validation loss kept, also after the training."""

    @field_validator("final_learning_rate")
    @classmethod
    def _fill_final_learning_rate(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None or "learning_rate" not in info.data:
            return value
        # rounded, so that 6e-4 gives the 6e-5 that a person would write
        return float(f"{info.data['learning_rate'] / 10:.15g}")

    @field_validator("decay_tokens")
    @classmethod
    def _fill_decay_tokens(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None or info.data.get("schedule") != "wsd" or "tokens" not in info.data:
            return value
        return max(1, int(info.data["tokens"]) // 5)

    @field_validator("warmup_tokens")
    @classmethod
    def _fill_warmup_tokens(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None or "tokens" not in info.data:
            return value
        return int(info.data["tokens"]) * 4 // 100

    @model_validator(mode="after")
    def _check(self) -> "TrainingConfig":
        raise_problems(self.kv.find_setting_problems())
        if self.residual != "float32" and self.precision == "float32":
            raise_problems([("residual", "is read only under precision: bfloat16; set that, too")])
        if self.schedule != "wsd":
            if self.decay_tokens is not None:
                raise_problems([("decay_tokens", "is read only by schedule: wsd; remove one")])
            return self
        assert self.warmup_tokens is not None, "filled in"
        assert self.decay_tokens is not None, "filled in"
        if self.tokens and self.warmup_tokens + self.decay_tokens > self.tokens:
            text = f"and warmup_tokens = {self.warmup_tokens} exceed tokens = {self.tokens}"
            raise_problems([("decay_tokens", f"{text}; shorten one")])
        return self

    @property
    def kv(self) -> KVStorage:
        """How the forward pass of training rounds K and V."""
        return KVStorage(self.kv_dtype, self.kv_group, self.kv_residual)

    def computation(self, model: ModelConfig) -> dict[str, Any]:
        """Return `identity` in a form that is equal for different spellings of one computation."""
        facts = {key: value for key, value in self.identity().items() if not key.startswith("kv_")}
        return facts | self.kv.identity(model)

    @property
    def steps(self) -> int:
        """The number of optimizer steps."""
        return self.tokens // self.batch_tokens

    @property
    def warmup_steps(self) -> int:
        """The steps of the warm-up, ``warmup_tokens`` rounded up to whole steps."""
        assert self.warmup_tokens is not None, "filled in"
        return min(-(-self.warmup_tokens // self.batch_tokens), self.steps)

    @property
    def decay_steps(self) -> int:
        """The steps of the decay of wsd, ``decay_tokens`` rounded up; 0 of other schedules."""
        decay = -(-(self.decay_tokens or 0) // self.batch_tokens)
        return min(decay, self.steps - self.warmup_steps)

    @property
    def stable_steps(self) -> int:
        """The steps of wsd before its decay, warm-up included.

        They are equal in trainings that differ in ``tokens``, ``decay_tokens`` and
        ``final_learning_rate`` alone. 0 if there is no decay to branch into.
        """
        return self.steps - self.decay_steps if self.decay_steps else 0
