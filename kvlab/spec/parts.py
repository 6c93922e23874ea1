"""The other parts of an experiment: data, training, serving, evaluation, resources."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from kvlab.spec.model_config import SharingField
from kvlab.spec.spec_model import (
    DecayRate,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SpecModel,
    normalize_level_name,
    raise_problems,
)

SOURCES = (
    "docstrings",
    "files",
    "fineweb-edu-10b",
    "fineweb-edu-100b",
    "fineweb-edu-350b",
    "fineweb-edu-crawl",
)
KV_DTYPES = ("model", "float32", "float16", "bfloat16", "int8", "fp8")


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class DataConfig(SpecModel):
    """`data`: which text, and how it becomes tokens."""

    not_identity: ClassVar[frozenset[str]] = frozenset({"paths", "licence"})  # the contents count

    source: Literal[
        "docstrings",
        "files",
        "fineweb-edu-10b",
        "fineweb-edu-100b",
        "fineweb-edu-350b",
        "fineweb-edu-crawl",
    ] = Field(default="docstrings", description="Where the text comes from.")
    subset: Annotated[str, Field(pattern=r"^CC-MAIN-[0-9]{4}-[0-9]{2}$")] | None = Field(
        default=None,
        description="The crawl, such as CC-MAIN-2024-10, for source: fineweb-edu-crawl.",
    )
    tokenizer: str = Field(
        default="gpt2",
        pattern=r"^(gpt2(:[1-9][0-9]{0,5})?|bytes)$",
        description="gpt2, gpt2:N (its first N ranks), or bytes.",
    )
    paths: Annotated[tuple[str, ...], BeforeValidator(_tuple)] = Field(
        default=(), description="Files or folders of text, for source: files."
    )
    licence: Annotated[str, Field(min_length=1, max_length=500)] | None = Field(
        default=None,
        description="What the text may be used for, in words, for source: files; recorded with"
        " the tokens and with every result.",
    )
    max_bytes: PositiveInt | None = Field(
        default=None, description="Stop after this many bytes of text (whole documents)."
    )
    max_tokens: PositiveInt | None = Field(
        default=None, description="Stop after this many tokens (whole documents)."
    )
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.01, description="Share of the documents held out, chosen by document hash."
    )

    mask_documents: bool = Field(
        default=False,
        description="Attention never crosses from one document into another, and positions start"
        " at 0 in each; default documents are packed and see those before them.",
    )

    @model_validator(mode="after")
    def _check(self) -> "DataConfig":
        problems = []
        if self.source == "files" and not self.paths:
            problems.append(("source", "needs data.paths; name at least one file or folder"))
        if self.source != "files" and self.paths:
            text = f"is read only by source: files, not {self.source}; remove one"
            problems.append(("paths", text))
        if self.source != "files" and self.licence is not None:
            text = f"is known to kvlab for {self.source}; say it only for source: files"
            problems.append(("licence", text))
        is_crawl = self.source == "fineweb-edu-crawl"
        if is_crawl and self.subset is None:
            text = "needs data.subset; name a crawl, such as CC-MAIN-2024-10"
            problems.append(("source", text))
        if self.subset is not None and not is_crawl:
            text = f"is read only by source: fineweb-edu-crawl, not {self.source}; remove one"
            problems.append(("subset", text))
        if self.max_bytes is not None and self.max_tokens is not None:
            problems.append(("max_tokens", "and max_bytes both say where to stop; remove one"))
        if self.tokenizer.startswith("gpt2:") and not 256 <= self.ranks <= 50256:
            text = "keeps too few or too many ranks; use 256 to 50256, such as gpt2:2048"
            problems.append(("tokenizer", text))
        raise_problems(problems)
        return self

    @property
    def ranks(self) -> int:
        """Byte-pair ranks kept; 256 is single bytes only."""
        name, _, count = self.tokenizer.partition(":")
        return 256 if name == "bytes" else int(count or 50256)

    @property
    def vocab_size(self) -> int:
        """Ranks plus the end-of-text token."""
        return self.ranks + 1

    @property
    def document_start(self) -> int | None:
        """The token at which attention ends and positions start; None: nowhere."""
        return self.ranks if self.mask_documents else None

    def identity(self) -> dict[str, Any]:
        """Without a mask or a subset where there is none, as before there was a choice."""
        unset = {"mask_documents": False, "subset": None}
        data = super().identity()
        return {key: value for key, value in data.items() if unset.get(key, ...) != value}


def _validate_init_from(value: Any) -> Any:
    if isinstance(value, dict) and value:
        value = {factor: normalize_level_name(level) for factor, level in value.items()}
        if all(isinstance(level, str) for level in value.values()):
            return value
    elif value is None or (isinstance(value, str) and value):
        return value
    text = "is not a folder, a repository or factor levels; write one such as ./weights,"
    raise PydanticCustomError("start", f"{text} openai-community/gpt2 or {{heads: mha}}")


InitFrom = Annotated[str | dict[str, str] | None, BeforeValidator(_validate_init_from)]


class TrainingConfig(SpecModel):
    """`training`: the recipe. AdamW, warm-up, then cosine or wsd to ``final_learning_rate``.

    A step is ``batch_tokens`` tokens; the number of steps is ``tokens // batch_tokens``.
    ``init_from`` names the first weights instead of drawing them: a published checkpoint, or
    another cell of the sweep, as the levels in which it differs (uptraining).
    """

    not_identity: ClassVar[frozenset[str]] = frozenset(
        {"checkpoint_every", "keep_last", "keep_best", "init_from"}
    )
    # init_from: its contents count, as `kvlab.trial.initial_weights` says

    tokens: NonNegativeInt = Field(
        default=0, description="Tokens seen in training; 0 trains nothing."
    )
    init_from: InitFrom = Field(
        default=None,
        description="First weights: a Hugging Face folder or repository, or the training of"
        " another cell, as in {heads: mha}; default freshly drawn.",
    )
    batch_tokens: PositiveInt = Field(default=8192, description="Tokens an optimizer step.")
    learning_rate: PositiveFloat = 6e-4
    final_learning_rate: Annotated[float, Field(ge=0.0)] | None = Field(
        default=None, description="Where the schedule ends; default a tenth of learning_rate."
    )
    schedule: Literal["cosine", "wsd"] = Field(
        default="cosine",
        description="After warm-up: half a cosine, or wsd: stable, then a decay at the end.",
    )
    decay_tokens: PositiveInt | None = Field(
        default=None, description="Of wsd, at the end of training; default 20% of tokens."
    )
    warmup_tokens: NonNegativeInt | None = Field(
        default=None, description="Linear warm-up; default 4% of tokens."
    )
    weight_decay: Annotated[float, Field(ge=0.0)] = Field(
        default=0.1, description="On matrices only."
    )
    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.95
    adam_eps: PositiveFloat = 1e-8
    clip: PositiveFloat = Field(default=1.0, description="Largest norm of the gradient.")
    spike: PositiveFloat | None = Field(
        default=1.0,
        description="The training has diverged once the mean loss of 32 steps is this many nats"
        " above the lowest such mean; null: never.",
    )
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = Field(default=False, description="torch.compile the model.")
    evaluate_every: PositiveInt = Field(default=100, description="Steps between validation losses.")
    evaluate_tokens: PositiveInt = Field(
        default=65_536, description="Validation tokens of each of those losses."
    )
    checkpoint_every: PositiveInt = Field(default=100, description="Steps between checkpoints.")
    keep_last: PositiveInt = Field(default=2, description="Newest checkpoints kept while training.")
    keep_best: NonNegativeInt = Field(
        default=0,
        description="Checkpoints of lowest validation loss kept, also after the training.",
    )

    @model_validator(mode="after")
    def _fill(self) -> "TrainingConfig":
        if self.final_learning_rate is None:
            # rounded, so that 6e-4 gives the 6e-5 that a person would write
            tenth = float(f"{self.learning_rate / 10:.15g}")
            object.__setattr__(self, "final_learning_rate", tenth)
        if self.warmup_tokens is None:
            object.__setattr__(self, "warmup_tokens", self.tokens * 4 // 100)
        if self.schedule == "wsd":
            if self.decay_tokens is None:
                object.__setattr__(self, "decay_tokens", max(1, self.tokens // 5))
            self._check_wsd()
        elif self.decay_tokens is not None:
            raise_problems([("decay_tokens", "is read only by schedule: wsd; remove one")])
        return self

    def _check_wsd(self) -> None:
        assert self.warmup_tokens is not None, "filled in"
        assert self.decay_tokens is not None, "filled in"
        if self.tokens and self.warmup_tokens + self.decay_tokens > self.tokens:
            text = f"and warmup_tokens = {self.warmup_tokens} exceed tokens = {self.tokens}"
            raise_problems([("decay_tokens", f"{text}; shorten one")])

    @property
    def steps(self) -> int:
        return self.tokens // self.batch_tokens


class ServingConfig(SpecModel):
    """`serving`: what changes only inference. It never retrains.

    ``tie`` joins layers on one cache slot though each was trained with its own K/V.
    ``tie_rule``: with ``overwrite`` every layer writes the shared slot and the last wins (the
    Character.AI article's code); with ``owner`` only the first layer of the group writes.
    """

    kv_dtype: Literal["model", "float32", "float16", "bfloat16", "int8", "fp8"] = Field(
        default="model", description="How K/V are stored; model keeps the model's dtype."
    )
    tie: SharingField = Field(default="none", description="Patterns as in model.kv_sharing.")
    tie_rule: Literal["overwrite", "owner"] = "overwrite"


class EvaluationConfig(SpecModel):
    """`evaluation`: quality. Every number once one-shot, and once through the cache if served."""

    loss_tokens: PositiveInt = Field(
        default=65_536, description="Validation tokens of the final loss."
    )
    hellaswag: Literal["all", "none"] | NonNegativeInt = Field(
        default="none", description="all, none, or the first N items."
    )
    served: bool = Field(default=True, description="Measure again through the serving cache.")
    served_tokens: PositiveInt | None = Field(
        default=None,
        description="Validation tokens scored through the cache, token by token; default"
        " loss_tokens.",
    )
    recall: NonNegativeInt = Field(
        default=0, description="Rows of the associative recall probe; 0 for none."
    )
    positions: bool = Field(
        default=False, description="Measure the loss by position; over served_tokens if served."
    )

    @property
    def hellaswag_items(self) -> int | None:
        """Items to score: None for all, 0 for none."""
        if isinstance(self.hellaswag, int):
            return self.hellaswag
        return None if self.hellaswag == "all" else 0


class ResourcesConfig(SpecModel):
    """`resources`: where a trial runs. Never part of what it computes."""

    cpus: Annotated[float, Field(gt=0, le=4096)] = 1.0
    gpus: Annotated[float, Field(ge=0, le=1024)] | Literal["auto"] = Field(
        default=0.0,
        description="A number, a fraction to share one, or auto: as many trials on one as its"
        " memory holds, measured before they start.",
    )
    workers: Annotated[PositiveInt, Field(le=1024)] | None = Field(
        default=None, description="Processes that train together; default one a whole GPU."
    )
    microbatch_tokens: PositiveInt | None = Field(
        default=None,
        description="Tokens a forward pass; smaller needs less memory, same mathematics.",
    )

    @model_validator(mode="after")
    def _check(self) -> "ResourcesConfig":
        if self.devices > 1 and not self.devices.is_integer():
            raise_problems(
                [("gpus", "is above 1 and not whole; use a fraction of one GPU or whole GPUs")]
            )
        if self.devices and self.workers not in (None, max(1, int(self.devices))):
            text = f"is not one a GPU, of which there are {self.devices:g}; remove it"
            raise_problems([("workers", text)])
        return self

    @property
    def devices(self) -> float:
        """GPUs that are asked for; of ``auto``, which is settled before a trial starts, one."""
        return 1.0 if self.gpus == "auto" else self.gpus

    @property
    def shares(self) -> bool:
        """Whether other trials may run on its GPU beside it."""
        return 0 < self.devices < 1

    @property
    def training_workers(self) -> int:
        """Processes that a training runs in, each with one device."""
        return self.workers or max(1, int(self.devices))
