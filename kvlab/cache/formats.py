"""Storage formats of the KV cache: how K and V are encoded in memory.

A format holds no state. It allocates the tensors of one K or V buffer, encodes values into them
and decodes them again. Attention always reads decoded values, also for the tokens of the current
pass, so results do not depend on how a text is split into chunks.

Shapes: B rows, H K/V heads, S entries of the buffer, D head_dim.
"""

from abc import ABC, abstractmethod
from pkgutil import resolve_name
from typing import NamedTuple

import torch
from torch import Tensor

from kvlab.layout.slot_plan import SlotPlan
from kvlab.spec.dtypes import DTYPES, ROTATIONS
from kvlab.spec.members import MemberError
from kvlab.spec.quantizers import Quantizer

Shape = tuple[int, int, int, int]
"""(B, H, S, D)."""


class ScaledCodes(NamedTuple):
    """Vectors as they are stored: codes (B, H, S, D), and the scales of each, (B, H, S, G).

    Attention reads them some at a time, and need not make all of the decoded vectors, in memory
    several times the codes. Where G is 1, a score is a query's product with codes, times the
    scale, and a value's scale multiplies its weight.

    Codes of uint8 are two in a byte, (B, H, S, D / 2), as `PackedInt4` stores them.
    """

    codes: Tensor
    scales: Tensor

    @property
    def is_packed(self) -> bool:
        return self.codes.dtype == torch.uint8

    @property
    def shape(self) -> torch.Size:
        """(B, H, S, D)."""
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] * (1 + self.is_packed)))

    @property
    def group_size(self) -> int:
        """Numbers that share a scale."""
        return self.shape[-1] // self.scales.shape[-1]

    def convert(self, dtype: torch.dtype) -> Tensor:
        """Return the codes as numbers of ``dtype``, (B, H, S, D)."""
        if self.is_packed:
            return unpack_codes(self.codes, 2).to(dtype) - 8
        return convert_codes(self.codes, dtype)

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the vectors (B, H, S, D)."""
        groups = split_groups(self.convert(dtype), self.group_size)
        return (groups * self.scales.to(dtype)[..., None]).flatten(-2)


Numbers = Tensor | ScaledCodes
"""Vectors (B, H, S, D): values, or codes with scales."""


class Rotated(NamedTuple):
    """Vectors (B, H, S, D) that are stored in another basis.

    A product of a rotated query and a rotated key is that of the two; a sum of rotated values is
    rotated back. So attention needs no vector itself. ``matrix`` (D, D), by which vectors were
    multiplied, is orthonormal and symmetric, so it leads back, too.
    """

    stored: Numbers
    matrix: Tensor

    @property
    def shape(self) -> torch.Size:
        """(B, H, S, D)."""
        return self.stored.shape

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the vectors (B, H, S, D), of ``dtype`` where they are stored as codes."""
        stored = self.stored
        values = stored if isinstance(stored, Tensor) else stored.decode(dtype)
        return values @ self.matrix.to(values.dtype)


Stored = Numbers | Rotated
"""What tokens have stored, (B, H, S, D), in any basis."""


def convert_codes(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return codes as numbers of ``dtype``.

    torch's conversion of float8 on CPU takes five times as long as this one, which moves the bits
    to those of a float16: its exponents are larger by 8. NaN is no code.
    """
    if codes.dtype != torch.float8_e4m3fn or codes.device.type != "cpu":
        return codes.to(dtype)
    bits = codes.view(torch.int8).to(torch.int16)
    sign = bits & -0x8000
    return (
        bits.bitwise_and_(0x7F)
        .bitwise_left_shift_(7)
        .bitwise_or_(sign)
        .view(torch.float16)
        .to(dtype)
        .mul_(2.0**8)
    )


def divide(values: Tensor, number: float) -> Tensor:
    """Return values / number, rounded once on every device.

    By a number torch's CUDA kernel multiplies with its reciprocal, which is rounded, too: scales
    and codes would differ from those of a CPU.
    """
    return values / (number if values.device.type == "cpu" else torch.full_like(values, number))


class KVFormat(ABC):
    """Encode and decode values of shape (..., D).

    Args:
        dtype: of the stored numbers.
        group: numbers of a vector that share a scale, if it has as many; None for all.

    Attributes:
        has_codes: whether encoded vectors (B, H, S, D) are the tensors of `ScaledCodes`.
        has_fixed_shapes: whether its operations may be captured and compiled.
    """

    has_codes = False
    has_fixed_shapes = True

    def __init__(self, dtype: torch.dtype, group: int | None = None):
        self.dtype, self.group = dtype, group

    @abstractmethod
    def allocate(self, shape: Shape, device: torch.device) -> tuple[Tensor, ...]:
        """Return the zero-filled tensors of one buffer, each of leading shape (B, H, S)."""

    @abstractmethod
    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """Encode ``values`` (..., D): one tensor for each that `allocate` returns."""

    @abstractmethod
    def decode(self, encoded: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Decode to values (..., D) of ``dtype``, as near to the originals as the format allows."""

    def view(self, encoded: tuple[Tensor, ...], dtype: torch.dtype) -> Stored:
        """Return what one query of each row attends to: codes, where vectors are stored so."""
        return self.decode(encoded, dtype)

    def rotate(self, values: Tensor) -> Tensor:
        """Return values (..., D) in the basis in which they are stored."""
        return values


class Dense(KVFormat):
    """Values in a floating-point dtype: one tensor (B, H, S, D)."""

    def allocate(self, shape: Shape, device: torch.device) -> tuple[Tensor, ...]:
        return (torch.zeros(shape, dtype=self.dtype, device=device),)

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        return (values.to(self.dtype),)

    def decode(self, encoded: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return encoded[0].to(dtype)


MIN_SCALE, MAX_SCALE = 2.0**-24, 65504.0
"""The range of positive float16: a vector of zeros still has a usable scale."""


class Quantized(KVFormat):
    """Codes (B, H, S, D) of int8 or float8, and float16 scales (B, H, S, D / group).

    Symmetric quantization with a scale for each token, head and group of its numbers: the largest
    magnitude of a group maps to the largest code. Scales for each token follow KIVI
    (arXiv 2402.02750), which finds that values need them.
    """

    has_codes = True

    def __init__(self, dtype: torch.dtype, group: int | None = None):
        super().__init__(dtype, group)
        info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        self.max_code = float(info.max)

    def allocate(self, shape: Shape, device: torch.device) -> tuple[Tensor, ...]:
        codes = torch.zeros(shape, dtype=self.dtype, device=device)
        groups = shape[3] // self._group_size(shape[3])
        scales = torch.zeros((*shape[:3], groups), dtype=torch.float16, device=device)
        return codes, scales

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        codes, scales = self._quantize(values)
        return codes.to(self.dtype), scales

    def _quantize(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes (..., D), still as float32, and scales (..., D / group)."""
        width = values.shape[-1]
        size, values = self._group_size(width), values.float()
        if size < width:
            values = split_groups(values, size)
        max_magnitude = values.abs().amax(-1, keepdim=True)
        scales = divide(max_magnitude, self.max_code).clamp_(MIN_SCALE, MAX_SCALE).half()
        codes = (values / scales.float()).clamp_(-self.max_code, self.max_code)
        if not self.dtype.is_floating_point:
            codes = codes.round_()
        return (codes, scales) if size == width else (codes.flatten(-2), scales.squeeze(-1))

    def _group_size(self, size: int) -> int:
        return min(self.group or size, size)

    def decode(self, encoded: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return ScaledCodes(*encoded).decode(dtype)

    def view(self, encoded: tuple[Tensor, ...], dtype: torch.dtype) -> Stored:  # noqa: ARG002
        return ScaledCodes(*encoded)


def split_groups(values: Tensor, size: int) -> Tensor:
    """Return values (..., D) as groups (..., D / size, size)."""
    return values.view(*values.shape[:-1], values.shape[-1] // size, size)


def pack_codes(codes: Tensor, per_byte: int) -> Tensor:
    """Return codes (..., D) of uint8 as bytes (..., D / per_byte).

    Byte i holds the codes i, i + D / per_byte, ..., from its lowest bits on.
    """
    packed, *others = codes.chunk(per_byte, -1)
    for number, part in enumerate(others, 1):
        packed = packed | (part << (number * (8 // per_byte)))
    return packed


def unpack_codes(packed: Tensor, per_byte: int) -> Tensor:
    """Return the codes (..., D) of bytes (..., D / per_byte)."""
    bits = 8 // per_byte
    return torch.cat([(packed >> (n * bits)) & (2**bits - 1) for n in range(per_byte)], -1)


class PackedInt4(Quantized):
    """Codes from -7 to 7, two in a byte (B, H, S, D / 2), and float16 scales (B, H, S, D / group).

    A byte holds the codes of numbers i and i + D / 2, each plus 8, the first in the lower half.
    Groups of 32 are those of llama.cpp's ``q4_0``: 4.5 bits a number.
    """

    def __init__(self, dtype: torch.dtype, group: int | None = None):
        super().__init__(dtype, group)
        self.max_code = 7.0

    def allocate(self, shape: Shape, device: torch.device) -> tuple[Tensor, ...]:
        _, scales = super().allocate(shape, device)
        packed = torch.zeros((*shape[:3], shape[3] // 2), dtype=self.dtype, device=device)
        return packed, scales

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        codes, scales = self._quantize(values)
        return pack_codes((codes + 8).to(self.dtype), 2), scales


def rotate(values: Tensor, matrix: Tensor) -> Tensor:
    """Return values (..., D) times ``matrix`` (D, D) of float64, in float32 or wider.

    The product is in float64, so that codes do not depend on the order of its sums.
    """
    rotated = values.double() @ matrix
    return rotated.to(torch.promote_types(values.dtype, torch.float32))


class RotatedFormat(KVFormat):
    """Values that another format stores in another basis.

    Args:
        stored: that format.
        matrix: (D, D) of float64, orthonormal and symmetric.
    """

    def __init__(self, stored: KVFormat, matrix: Tensor):
        super().__init__(stored.dtype, stored.group)
        self.stored, self.matrix, self.has_codes = stored, matrix, stored.has_codes
        self.has_fixed_shapes = stored.has_fixed_shapes

    def allocate(self, shape: Shape, device: torch.device) -> tuple[Tensor, ...]:
        return self.stored.allocate(shape, device)

    def rotate(self, values: Tensor) -> Tensor:
        return rotate(values, self.matrix)

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        return self.stored.encode(self.rotate(values))

    def decode(self, encoded: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return Rotated(self.stored.decode(encoded, dtype), self.matrix).decode(dtype)

    def view(self, encoded: tuple[Tensor, ...], dtype: torch.dtype) -> Stored:
        stored = self.stored.view(encoded, dtype)
        assert not isinstance(stored, Rotated)
        return Rotated(stored, self.matrix)


class QuantizerFormat(KVFormat):
    """Codes of a quantizer of a user's file, each tensor (B, H, S, count)."""

    has_fixed_shapes = False  # it may do what no capture takes

    def __init__(self, quantizer: Quantizer):
        super().__init__(torch.float32)
        self.quantizer = quantizer

    def allocate(self, shape: Shape, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(
            torch.zeros((*shape[:3], count), dtype=getattr(torch, dtype), device=device)
            for count, dtype in self.quantizer.stored(shape[3])
        )

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(values.device.type, enabled=False):  # as in a cache
            encoded = self.quantizer.encode(values.float())
        if not isinstance(encoded, tuple):
            found = f"returns a {type(encoded).__name__} from encode"
            raise MemberError(self.quantizer, f"{found}; return a tuple, as in (codes, scale)")
        stored = self.quantizer.stored(values.shape[-1])
        wanted = [((*values.shape[:-1], n), getattr(torch, dtype)) for n, dtype in stored]
        found = [(tuple(one.shape), one.dtype) for one in encoded]
        if found != wanted:  # a buffer would take some of them, converted or repeated
            given = f"encode of {tuple(values.shape)}"
            raise MemberError(self.quantizer, f"returns {found} from {given}; return {wanted}")
        return encoded

    def decode(self, encoded: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        with torch.autocast(encoded[0].device.type, enabled=False):
            decoded: Tensor = self.quantizer.decode(*encoded)
        return decoded.to(dtype)


def make_matrices(plan: SlotPlan, device: torch.device) -> list[Tensor]:
    """Return by what each part of a slot is multiplied before it is stored; nothing for none."""
    if plan.kv_rotate == "none":
        return []
    make = resolve_name(f"{ROTATIONS[plan.kv_rotate]}:make_matrix")
    return [make(part.size, device) for part in plan.layer.stored]


def get_format(name: str | Quantizer, group: int | None = None) -> KVFormat:
    """Return the format of a quantizer, or of an entry of `kvlab.spec.dtypes.DTYPES`.

    That table names this module's classes. To add a format, add a class here and an entry there.

    Args:
        group: `serving.kv_group`.
    """
    if isinstance(name, Quantizer):
        return QuantizerFormat(name)
    entry = DTYPES[name]
    dtype, group = getattr(torch, entry.torch_name), group or entry.default_group
    kv_format: KVFormat = resolve_name(entry.kv_format)(dtype, group)
    return kv_format
