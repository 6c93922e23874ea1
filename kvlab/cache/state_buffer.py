"""The buffer of a slot that stores a state of fixed size (`kvlab.layout.state_slot`).

A state has one memory for any number of tokens, and every pass overwrites it. The state of a row
without tokens is zero, whatever its memory holds.

Shapes: B rows, H heads of a state, S and what follows its other dimensions.
"""

import copy
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from kvlab.cache.attention_pass import KVContext
from kvlab.cache.slot_pass import EntryRange, PassRows, SlotBuffer, SlotPass
from kvlab.layout.state_slot import StateSlot


class StateBuffer(SlotBuffer):
    """The states of B rows, each (B, H, S, ...).

    A decode step is not one that can be captured: it changes what it goes on from, so its warm-up
    would count as tokens.
    """

    def __init__(
        self,
        plan: StateSlot,
        rows: int,
        context: int,  # noqa: ARG002
        dtype: torch.dtype,
        device: torch.device,
    ):
        stored = getattr(torch, plan.storage_dtype(str(dtype).removeprefix("torch.")))
        self.states = tuple(
            torch.zeros((rows, *shape), dtype=stored, device=device) for shape in plan.shapes
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.states

    def begin_pass(self, rows: PassRows) -> SlotPass:
        return StatePass(self, rows)

    def list_segment(self, start: int, end: int) -> list[EntryRange]:  # noqa: ARG002
        return []

    def list_snapshot(self, length: int) -> list[EntryRange]:
        return [((state,), [slice(0, state.shape[2])]) for state in self.states if length]

    def map_rows(self, select: Callable[[Tensor], Tensor]) -> Self:
        rows = copy.copy(self)
        rows.states = tuple(map(select, self.states))
        return rows


class StatePass(SlotPass):
    """One pass through a layer with a state, which reads it before it writes."""

    def __init__(self, buffer: StateBuffer, rows: PassRows):
        self._buffer, self._rows = buffer, rows

    def read(self) -> KVContext:
        rows, states = self._rows, self._buffer.states
        if not all(rows.past):
            is_begun = rows.share("begun", lambda: rows.lengths > 0)
            states = tuple(
                torch.where(is_begun.view(-1, *[1] * (state.dim() - 1)), state, 0)
                for state in states
            )
        return KVContext(states, is_real=None if rows.is_even else rows.is_real)

    def write(self, parts: tuple[Tensor, ...]) -> None:
        for stored, state in zip(self._buffer.states, parts, strict=True):
            stored.copy_(state)

    def key_positions(self) -> Tensor:
        raise AssertionError("a state has no keys")
