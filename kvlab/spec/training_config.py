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

    tokens: NonNegativeInt = Field(
        default=0,
        description="Tokens seen in training; 0 trains nothing.",
        examples=[1e10],
        json_schema_extra={"unit": "tokens"},
    )
    init_from: InitFrom = Field(
        default=None,
        description="First weights: a Hugging Face folder or repository, or the"
        " training of another cell, as in {heads: mha}.",
        examples=["openai-community/gpt2"],
        json_schema_extra={"computed_default": "freshly drawn"},
    )
    batch_tokens: PositiveInt = Field(
        default=8192,
        description="Tokens of an optimizer step.",
        examples=[524288],
        json_schema_extra={"unit": "tokens"},
    )
    learning_rate: PositiveFloat = Field(
        default=6e-4,
        description="Peak learning rate, at the end of the warm-up.",
        examples=[0.001],
        json_schema_extra={"unit": "none"},
    )
    final_learning_rate: Annotated[float, Field(ge=0.0)] | None = Field(
        default=None,
        validate_default=True,
        description="Learning rate at the end of the schedule.",
        examples=[0.0001],
        json_schema_extra={"unit": "none", "computed_default": "learning_rate / 10"},
    )
    schedule: Literal["cosine", "wsd"] = Field(
        default="cosine",
        description="After warm-up: half a cosine, or wsd: stable, then a decay at the end.",
        examples=["wsd"],
    )
    decay_tokens: PositiveInt | None = Field(
        default=None,
        validate_default=True,
        description="Length of the decay of schedule: wsd, at the end of training.",
        examples=[2e9],
        json_schema_extra={
            "unit": "tokens",
            "computed_default": "20% of tokens under wsd",
            "given": {"schedule": "wsd", "tokens": 1e10},
        },
    )
    warmup_tokens: NonNegativeInt | None = Field(
        default=None,
        validate_default=True,
        description="Linear warm-up. Under wsd, token budgets of equal warm-up"
        " share their stable phase.",
        examples=[3.75e8],
        json_schema_extra={
            "unit": "tokens",
            "computed_default": "4% of tokens",
            "given": {"tokens": 1e10},
        },
    )
    weight_decay: Annotated[float, Field(ge=0.0)] = Field(
        default=0.1,
        description="Decoupled weight decay of AdamW (arXiv 1711.05101), on matrices only.",
        examples=[0.05],
        json_schema_extra={"unit": "none"},
    )
    beta1: DecayRate = Field(
        default=0.9,
        description="Decay rate of AdamW's mean of gradients.",
        examples=[0.95],
        json_schema_extra={"unit": "none"},
    )
    beta2: DecayRate = Field(
        default=0.95,
        description="Decay rate of AdamW's mean of squared gradients.",
        examples=[0.99],
        json_schema_extra={"unit": "none"},
    )
    adam_eps: PositiveFloat = Field(
        default=1e-8,
        description="Added to the denominator of AdamW's step.",
        examples=[1e-07],
        json_schema_extra={"unit": "none"},
    )
    clip: PositiveFloat = Field(
        default=1.0,
        description="Largest norm of the gradient.",
        examples=[0.5],
        json_schema_extra={"unit": "none"},
    )
    spike: PositiveFloat | None = Field(
        default=1.0,
        description="The training has diverged once the mean loss of 32 steps is this many nats"
        " above the lowest such mean; null: never.",
        examples=[2.0],
        json_schema_extra={"unit": "nats/token"},
    )
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Of the matrix products; weights and optimizer stay in float32.",
        examples=["bfloat16"],
    )
    residual: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Of the residual stream, which every layer reads and adds to, under precision:"
        " bfloat16. bfloat16 moves and keeps half the bytes, and rounds each sum.",
        examples=["bfloat16"],
        json_schema_extra={"given": {"precision": "bfloat16"}},
    )
    int8: Annotated[TupleOf[Int8Product], AfterValidator(_order_products)] = Field(
        default=(),
        description="Products of the linear layers of attention and MLPs that are in int8, with a"
        " scale for each row and column that is found anew in each pass; embeddings and head are"
        " left out. [output, grad_input] is SwitchBack (arXiv 2304.13013).",
        examples=[["output", "grad_input", "grad_weight"]],
    )
    kv_dtype: Annotated[str, OneOf(list_kv_dtypes)] = Field(
        default="model",
        description="The forward pass reads K/V as a cache of this serving.kv_dtype would give"
        " them back; gradients pass straight through. Without it they are not rounded.",
        examples=["int8"],
    )
    kv_group: Annotated[PositiveInt, Field(ge=MIN_GROUP)] | None = Field(
        default=None,
        description="As serving.kv_group, of training.kv_dtype. It does not follow serving's.",
        examples=[16],
        json_schema_extra={
            "unit": "numbers",
            "computed_default": "that of serving.kv_group in the same kv_dtype",
            "given": {"kv_dtype": "int4"},
        },
    )
    kv_residual: NonNegativeInt | None = Field(
        default=None,
        description="As serving.kv_residual, of training.kv_dtype. It does not follow serving's.",
        examples=[64],
        json_schema_extra={
            "unit": "tokens",
            "computed_default": "128 for kivi4 and kivi2",
            "given": {"kv_dtype": "kivi2"},
        },
    )
    compile: bool = Field(default=False, description="torch.compile the model.", examples=[True])
    evaluate_every: PositiveInt = Field(
        default=100,
        description="Steps between validation losses.",
        examples=[250],
        json_schema_extra={"unit": "steps"},
    )
    evaluate_tokens: PositiveInt = Field(
        default=65_536,
        description="Validation tokens of each of those losses.",
        examples=[8192],
        json_schema_extra={"unit": "tokens"},
    )
    checkpoint_every: PositiveInt | None = Field(
        default=None,
        description="Steps between checkpoints. Without it ten minutes, or twenty times as long as"
        " writing one takes.",
        examples=[500],
        json_schema_extra={"unit": "steps", "computed_default": "ten minutes"},
    )
    keep_last: PositiveInt = Field(
        default=2,
        description="Newest checkpoints kept while training.",
        examples=[3],
        json_schema_extra={"unit": "checkpoints"},
    )
    keep_best: NonNegativeInt = Field(
        default=0,
        description="Checkpoints of lowest validation loss kept, also after the training.",
        examples=[1],
        json_schema_extra={"unit": "checkpoints"},
    )

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
