"""`training` of an experiment: the recipe."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from kvlab.own_extensions import extend, find_members
from kvlab.spec import spec_model as spec
from kvlab.spec.dtypes import MIN_GROUP, KVDtypeName, KVStorage
from kvlab.spec.model_config import ModelConfig


def _validate_init_from(value: Any) -> Any:
    if isinstance(value, dict) and value:
        value = {factor: spec.normalize_level_name(level) for factor, level in value.items()}
        if all(isinstance(level, str) for level in value.values()):
            return value
    elif value is None or (isinstance(value, str) and value):
        return value
    text = "is not a folder, a repository or factor levels; write one such as ./weights,"
    return spec.raise_problems([("", f"{text} openai-community/gpt2 or {{heads: mha}}")])


@dataclass(frozen=True)
class OptimizerEntry:
    """One member of the family.

    Attributes:
        make: ``module:function`` that takes the model and `TrainingConfig`.
        matrix_moments: numbers that it keeps of a weight of attention or an MLP; of others two.
    """

    make: str
    matrix_moments: int = 2


OPTIMIZERS: dict[str, OptimizerEntry] = {
    "adamw": OptimizerEntry("kvlab.train.train_step:make_optimizer"),
    **find_members("optimizers"),
}


@extend("training")
class TrainingConfig(spec.SpecModel):
    """`training`: the recipe. Warm-up, then cosine or wsd to ``final_learning_rate``.

    A step is ``batch_tokens`` tokens; the number of steps is ``tokens // batch_tokens``.
    ``init_from`` names the first weights instead of drawing them: a published checkpoint, or
    another cell of the sweep, as the levels in which it differs (uptraining).
    """

    excluded_from_identity = frozenset({"checkpoint_every", "init_from"})
    # `kvlab.trial.initial_weights` adds the contents of init_from
    omitted_defaults = frozenset({"residual", "kv_dtype", "kv_group", "optimizer"})

    tokens: spec.NonNegativeInt = 0
    """Tokens seen in training; 0 trains nothing. Unit: tokens. Example: 1e10"""
    init_from: Annotated[str | dict[str, str] | None, BeforeValidator(_validate_init_from)] = None
    """First weights: a Hugging Face folder or repository, or the training of another cell, as in
    {heads: mha}.
    Default: freshly drawn. Example: openai-community/gpt2"""
    batch_tokens: spec.PositiveInt = 8192
    """Tokens of an optimizer step; by default in whole rows of block_size.
    Unit: tokens. Example: 524288"""
    learning_rate: spec.PositiveFloat = 6e-4
    """Peak learning rate, at the end of the warm-up. Unit: none. Example: 0.001"""
    final_learning_rate: Annotated[float, Field(ge=0.0)] | None = None
    """Learning rate at the end of the schedule.
    Unit: none. Default: learning_rate / 10. Example: 0.0001"""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After warm-up: half a cosine, or wsd: stable, then a decay at the end. Example: wsd"""
    decay_tokens: spec.PositiveInt | None = None
    """Length of the decay of schedule: wsd, at the end of training.
    Unit: tokens. Default: 20% of tokens under wsd. Example: 2e9, schedule: wsd, tokens: 1e10"""
    warmup_tokens: spec.NonNegativeInt | None = None
    """Linear warm-up. Under wsd, token budgets of equal warm-up share their stable phase.
    Unit: tokens. Default: 4% of tokens. Example: 3.75e8, tokens: 1e10"""
    optimizer: Annotated[str, spec.OneOf(lambda: OPTIMIZERS)] = "adamw"
    """Which optimizer steps; adamw is arXiv 1711.05101. Example: adamw"""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    """Decoupled weight decay, on matrices only.
    Unit: none. Example: 0.05"""
    beta1: spec.DecayRate = 0.9
    """Decay rate of AdamW's mean of gradients. Unit: none. Example: 0.95"""
    beta2: spec.DecayRate = 0.95
    """Decay rate of AdamW's mean of squared gradients. Unit: none. Example: 0.99"""
    adam_eps: spec.PositiveFloat = 1e-8
    """Added to the denominator of AdamW's step. Unit: none. Example: 1e-7"""
    clip: spec.PositiveFloat = 1.0
    """Largest norm of the gradient. Unit: none. Example: 0.5"""
    spike: spec.PositiveFloat | None = 1.0
    """The training has diverged once the mean loss of 32 steps is this many nats above the lowest
    such mean; null: never.
    Unit: nats/token. Example: 2"""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the matrix products; weights and optimizer stay in float32. Example: bfloat16"""
    residual: Literal["float32", "bfloat16"] = "float32"
    """Of the residual stream, which every layer reads and adds to, under precision: bfloat16.
    bfloat16 moves and keeps half the bytes, and rounds each sum.
    Example: bfloat16, precision: bfloat16"""
    kv_dtype: KVDtypeName = "model"
    """The forward pass reads K/V as a cache of this serving.kv_dtype would give them back;
    gradients pass straight through. Without it they are not rounded.
    Example: int8"""
    kv_group: Annotated[spec.PositiveInt, Field(ge=MIN_GROUP)] | None = None
    """As serving.kv_group, of training.kv_dtype. It does not follow serving's.
    Unit: numbers. Default: that of serving.kv_group in the same kv_dtype. Example: 16, kv_dtype:
    int4"""
    compile: bool = False
    """torch.compile the model. Example: true"""
    evaluate_every: spec.PositiveInt = 100
    """Steps between validation losses. Unit: steps. Example: 250"""
    evaluate_tokens: spec.PositiveInt = 65_536
    """Validation tokens of each of those losses. Unit: tokens. Example: 8192"""
    checkpoint_every: spec.PositiveInt | None = None
    """Steps between checkpoints. Without it ten minutes, or twenty times as long as writing one
    takes.
    Unit: steps. Default: ten minutes. Example: 500"""

    @field_validator("final_learning_rate", "decay_tokens", "warmup_tokens")
    @classmethod
    def _fill_from_others(cls, value: float | None, info: ValidationInfo) -> float | None:
        match info.field_name, info.data:  # without the keys that are wrong
            case _ if value is not None:
                return value
            case "final_learning_rate", {"learning_rate": rate}:
                # rounded, so that 6e-4 gives the 6e-5 that a person would write
                return float(f"{rate / 10:.15g}")
            case "decay_tokens", {"tokens": tokens, "schedule": "wsd"}:
                return max(1, int(tokens) // 5)
            case "warmup_tokens", {"tokens": tokens}:
                return int(tokens) * 4 // 100
        return None

    def _find_problems(self) -> spec.Problems:
        yield from self.kv.find_setting_problems()
        if self.residual != "float32" and self.precision == "float32":
            yield "residual", "is read only under precision: bfloat16; set that, too"
        if self.schedule != "wsd":
            if self.decay_tokens is not None:
                yield "decay_tokens", "is read only by schedule: wsd; remove one"
            return
        assert self.warmup_tokens is not None, "filled in"
        assert self.decay_tokens is not None, "filled in"
        if self.tokens and self.warmup_tokens + self.decay_tokens > self.tokens:
            text = f"and warmup_tokens = {self.warmup_tokens} exceed tokens = {self.tokens}"
            yield "decay_tokens", f"{text}; shorten one"

    @property
    def kv(self) -> KVStorage:
        """How the forward pass of training rounds K and V."""
        return KVStorage.of(self)

    def identity_of(self, model: ModelConfig) -> dict[str, Any]:
        facts = super().identity_of(model)
        own = {k: v for k, v in facts.items() if k not in ("kv_dtype", "kv_group", "kv_residual")}
        return own | self.kv.identity(model)

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
