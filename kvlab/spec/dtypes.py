"""The number formats by name: how many bytes each takes, and how K and V are stored in it.

This is the one table of `serving.kv_dtype` and `training.kv_dtype`. The YAML's choices and their
messages, the byte arithmetic of `kvlab.layout` and the buffers of `kvlab.cache` all read it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import WrapValidator

from kvlab.humanize import format_count
from kvlab.own_extensions import find_members, name_members
from kvlab.spec.members import accept_offered, name_or_member
from kvlab.spec.quantizers import ITEM_BYTES, Quantizer
from kvlab.spec.spec_model import Problems, SpecModel, join_or

if TYPE_CHECKING:
    from kvlab.spec.kv_forms import StoredVectors
    from kvlab.spec.model_config import ModelConfig

SCALE_BYTES = 2
"""A scale is a float16."""

DEFAULT_GROUP = 32
"""Numbers of a head that share a scale in a format of 4 bits."""

MIN_GROUP = 4
"""A group of fewer numbers is little more than its scale: it saves nothing, and rounds nothing."""

MODEL_DTYPE = "float32"
"""The dtype of a trial's parameters, and of its cache where ``kv_dtype`` is ``model``."""


@dataclass(frozen=True)
class DType:
    """One number format.

    Attributes:
        item_bytes: of one number, or of ``numbers_per_item`` that are packed together.
        torch_name: the attribute of ``torch``; an older torch may lack it.
        kv_format: the class that stores K and V in it, as ``module:class``. It is named, not
            imported: specs and plans do not import torch.
        scale_bytes: of a scale, and of a zero point if there is one. Each group of a head's
            numbers has one, in K and in V.
        numbers_per_item: 2 or 4 where as many codes are packed in a byte.
        default_group: numbers of a group where `serving.kv_group` does not say; None for a
            head's whole vector.
    """

    item_bytes: int
    torch_name: str
    kv_format: str = "kvlab.cache.formats:Dense"
    scale_bytes: int = 0
    numbers_per_item: int = 1
    default_group: int | None = None

    @property
    def is_quantized(self) -> bool:
        return self.scale_bytes > 0

    def group_size(self, size: int, group: int | None = None) -> int:
        """Return how many of a vector's ``size`` numbers share a scale."""
        return min(group or self.default_group or size, size)

    def vector_bytes(self, size: int, group: int | None = None) -> int:
        """Return the bytes of one vector of ``size`` numbers, its scales included."""
        scales = size // self.group_size(size, group)
        return size // self.numbers_per_item * self.item_bytes + scales * self.scale_bytes

    def describe_vector(self, size: int, group: int | None = None) -> str:
        """Return the arithmetic of `vector_bytes` as text."""
        packed = f" / {self.numbers_per_item}" if self.numbers_per_item > 1 else ""
        vector = f"{size}{packed} x {format_count(self.item_bytes, 'byte')}"
        if not self.is_quantized:
            return vector
        scales = size // self.group_size(size, group)
        count, unit = (f"{scales} x ", "scales") if scales > 1 else ("", "scale")
        return f"({vector} + {count}{self.scale_bytes} for the {unit})"

    def find_size_problem(
        self, size: int, group: int | None, name: str, section: str
    ) -> str | None:
        """Return why vectors of ``size`` numbers cannot be stored in it, or None if they can.

        Args:
            name: of such a vector, ``head``, ``latent`` or ``rotary key``.
            section: of the spec that names the dtype, ``serving`` or ``training``.
        """
        if not self.is_quantized or (group is None and self.default_group is None):
            return None
        if group is None:
            group = self.group_size(size)
        if size % group == 0 and group >= MIN_GROUP and size % self.numbers_per_item == 0:
            return None
        usable = [n for n in range(MIN_GROUP, size + 1) if size % n == 0]
        if not usable or size % self.numbers_per_item:
            multiple = max(MIN_GROUP, self.numbers_per_item)
            return f"cannot store a {name} of {size} numbers; use a multiple of {multiple}"
        what = f"head_dim = {size}" if name == "head" else f"the {size} numbers of a {name}"
        return f"needs groups that divide {what}; use {section}.kv_group: {join_or(usable)}"


@dataclass(frozen=True)
class BlockDType(DType, ABC):
    """A format that quantizes tokens in blocks, once newer ones follow.

    So what a query reads of a token depends on the query, too. A slot plan of its own stores it.

    Attributes:
        default_residual: newest tokens in full precision where `serving.kv_residual` does not say.
        one_shot_pass: a function, as ``module:function``, that begins the pass of a training that
            reads K and V so. It has the arguments of `kvlab.cache.begin_one_shot_pass` up to
            ``documents``.
    """

    default_residual: int = 0
    one_shot_pass: str = ""

    @abstractmethod
    def identity(self, kv: "KVStorage") -> dict[str, Any]:
        """Return which tokens are quantized when, as plain data."""

    @abstractmethod
    def find_model_problems(
        self, kv: "KVStorage", model: "ModelConfig", section: str
    ) -> Iterator[str]:
        """Yield why K and V of ``model`` cannot be quantized in blocks, or would never be."""


@dataclass(frozen=True)
class QuantizerDType(DType):
    """The format of a quantizer of a user's file, which knows its own bytes."""

    item_bytes: int = 0
    torch_name: str = ""
    quantizer: Quantizer = field(kw_only=True)

    def vector_bytes(self, size: int, group: int | None = None) -> int:  # noqa: ARG002
        return self.quantizer.vector_bytes(size)

    def describe_vector(self, size: int, group: int | None = None) -> str:  # noqa: ARG002
        stored = self.quantizer.stored(size)
        counts = [f"{n} x {format_count(ITEM_BYTES[dtype], 'byte')}" for n, dtype in stored]
        return counts[0] if len(counts) == 1 else f"({' + '.join(counts)})"

    def find_size_problem(
        self,
        size: int,
        group: int | None,  # noqa: ARG002
        name: str,
        section: str,  # noqa: ARG002
    ) -> str | None:
        problem = self.quantizer.find_problem(size)
        return problem and f"cannot store a {name} of {size} numbers: {self.quantizer} {problem}"


DTYPES: dict[str, DType] = {
    "float64": DType(8, "float64"),
    "float32": DType(4, "float32"),
    "float16": DType(2, "float16"),
    "bfloat16": DType(2, "bfloat16"),
    "int8": DType(1, "int8", "kvlab.cache.formats:Quantized", SCALE_BYTES),
    "fp8": DType(1, "float8_e4m3fn", "kvlab.cache.formats:Quantized", SCALE_BYTES),
    "int4": DType(1, "uint8", "kvlab.cache.formats:PackedInt4", SCALE_BYTES, 2, DEFAULT_GROUP),
    **find_members("kv_dtypes"),
}


def find_dtype(name: str | Quantizer) -> DType:
    """Return the format of a name of `DTYPES`, or of a quantizer of a user's file."""
    return DTYPES[name] if isinstance(name, str) else QuantizerDType(quantizer=name)


if TYPE_CHECKING:
    KVDtypeName = str | Quantizer
else:
    KVDtypeName = name_or_member(
        Quantizer,
        lambda: ["model", *(name for name in DTYPES if name != "float64")],  # which serves tests
    )


class KVDtypes(SpecModel):
    """`serving.kv_dtype` as a map: K and V in dtypes of their own."""

    k: KVDtypeName
    """How K is stored. Example: int8, v: int4"""
    v: KVDtypeName
    """How V is stored. Example: int4, k: int8"""

    def __str__(self) -> str:
        return f"{{k: {self.k}, v: {self.v}}}"


def _validate_kv_dtype(value: Any, handler: Callable[[Any], Any]) -> Any:
    """Validate a mapping by itself: an error is about one of its keys."""
    is_of_both = isinstance(value, dict) and value.keys() & {"k", "v"}
    if not is_of_both and not isinstance(value, KVDtypes):
        return handler(value)
    own = KVDtypes.model_validate(value)
    return own.k if own.k == own.v else own


KVDtype = str | Quantizer | KVDtypes
KVDtypeField = Annotated[
    KVDtypeName | KVDtypes, WrapValidator(_validate_kv_dtype), accept_offered(Quantizer)
]


def list_part_dtypes(kv_dtype: KVDtype, parts: int, dtype: str) -> tuple[str | Quantizer, ...]:
    """Return in what each of a token's ``parts`` is stored, of a model of ``dtype``."""
    own = kv_dtype
    names = (own.k, own.v) if isinstance(own, KVDtypes) else (own,) * parts
    return tuple(dtype if name == "model" else name for name in names[:parts])


def token_bytes(
    parts: Iterable["StoredVectors"], dtypes: Iterable[str | Quantizer], group: int | None = None
) -> int:
    """Return the bytes of one token, whose parts have a dtype each, their scales included."""
    stored = zip(parts, dtypes, strict=True)
    return sum(p.count * find_dtype(name).vector_bytes(p.size, group) for p, name in stored)


ROTATIONS: dict[str, str] = name_members("rotations")
"""`serving.kv_rotate` -> the module that has ``find_size_problem``, without torch, and
``make_matrix``, by whose matrix vectors are multiplied before they are stored."""


@dataclass(frozen=True)
class KVStorage:
    """How K and V are stored.

    Attributes:
        dtype: a name of `kvlab.spec.dtypes.DTYPES`, or ``model`` for the model's dtype; or those
            of K and V.
        group: numbers of a head that share a scale; None for the dtype's default.
        residual: newest tokens in full precision; None for the dtype's default.
        rotate: a name of `ROTATIONS`, or ``none``.
    """

    dtype: KVDtype = "model"
    group: int | None = None
    residual: int | None = None
    rotate: str = "none"

    @classmethod
    def of(cls, section: SpecModel) -> "KVStorage":
        """Return what the fields ``kv_*`` of a section say. Extensions add some of them."""
        names = [name for name in cls.__dataclass_fields__ if hasattr(section, f"kv_{name}")]
        return cls(**{name: getattr(section, f"kv_{name}") for name in names})

    @property
    def settings(self) -> dict[str, Any]:
        """Those of `serving` that store K and V so."""
        return {f"kv_{name}": value for name, value in vars(self).items() if value is not None}

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The dtypes of K and V, or the one of both."""
        return tuple(dict.fromkeys(map(find_dtype, list_part_dtypes(self.dtype, 2, MODEL_DTYPE))))

    @property
    def quantized(self) -> tuple[DType, ...]:
        """Those of the dtypes that have scales, for each group of numbers."""
        return tuple(dtype for dtype in self.dtypes if dtype.is_quantized)

    @property
    def has_fixed_steps(self) -> bool:
        """Whether each decode step runs the same operations on tensors of the same shapes."""
        return not any(isinstance(one, BlockDType | QuantizerDType) for one in self.dtypes)

    @property
    def block_dtype(self) -> BlockDType | None:
        """The first of the dtypes of K and V that quantizes tokens in blocks; None: none does."""
        return next((one for one in self.quantized if isinstance(one, BlockDType)), None)

    def resolve_group(self, model: "ModelConfig") -> int | None:
        """Return the group of the scales, or None where it is the dtype's default in every layer.

        Different spellings of one format give one layout, and so one trial.
        """
        if self.group is None:
            return None
        is_default = all(
            dtype.group_size(size, self.group) == dtype.group_size(size)
            for dtype in self.quantized
            for size in model.stored_sizes
        )
        return None if is_default else self.group

    def identity(self, model: "ModelConfig") -> dict[str, Any]:
        """Return what is computed in another way than with K and V in the model's dtype.

        Empty for the widest dtype that a model computes in, which rounds nothing.
        """
        if self.dtype in ("model", MODEL_DTYPE):
            return {}
        own = self.dtype
        facts: dict[str, Any] = {"kv_dtype": own.describe() if isinstance(own, Quantizer) else own}
        if (group := self.resolve_group(model)) is not None:
            facts["kv_group"] = group
        return facts | (self.block_dtype.identity(self) if self.block_dtype else {})

    def find_setting_problems(self) -> Problems:
        """Yield which settings say nothing in this dtype, by fields of a section."""
        in_blocks = [name for name, one in DTYPES.items() if isinstance(one, BlockDType)]
        if len({isinstance(one, BlockDType) for one in self.dtypes}) > 1:
            text = "quantizes one of K and V in blocks of tokens, and the other token by token"
            yield "kv_dtype", f"{text}; use {join_or(in_blocks)} for both, or for neither"
            return
        if self.group is not None and not self.quantized:
            names = join_or(name for name, dtype in DTYPES.items() if dtype.is_quantized)
            text = f"has no scales to group in kv_dtype {self.dtype}"
            yield "kv_group", f"{text}; leave it out, or use {names}"
        if self.residual is not None and self.block_dtype is None:
            text = f"has no effect in kv_dtype {self.dtype}, which stores every token alike"
            fix = f", or use {join_or(in_blocks)}" if in_blocks else ""
            yield "kv_residual", f"{text}; leave it out{fix}"

    def find_storage_problems(self, model: "ModelConfig", section: str) -> Problems:
        """Yield why K and V of ``model`` cannot be stored this way, by fields of a spec."""
        if not model.stored_sizes and (self.dtype != "model" or self.rotate != "none"):
            field = "kv_dtype" if self.dtype != "model" else "kv_rotate"
            cause = "is of tokens, and no layer stores any, but a state alone"
            yield f"{section}.{field}", f"{cause}; leave it out, or use a pattern with G"
            return
        if self.rotate != "none":
            find = resolve_name(f"{ROTATIONS[self.rotate]}:find_size_problem")
            found = (find(size, name) for size, name in model.stored_sizes.items())
            if (text := next(filter(None, found), None)) is not None:
                yield f"{section}.kv_rotate", text
        if isinstance(self.dtype, KVDtypes) and not model.kv_form.stores_keys:
            text = "stores K and V apart, so it needs model.kv: separate"
            yield f"{section}.kv_dtype", f"{text}; use one dtype for what both are views of"
            return
        field = f"{section}.{'kv_dtype' if self.group is None else 'kv_group'}"
        problems = (
            dtype.find_size_problem(size, self.group, name, section)
            for dtype in self.dtypes
            for size, name in model.stored_sizes.items()
        )
        if (problem := next(filter(None, problems), None)) is not None:
            yield field, problem
        if self.block_dtype is not None:
            for problem in self.block_dtype.find_model_problems(self, model, section):
                yield f"{section}.kv_dtype", problem
