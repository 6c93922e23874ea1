"""The attention backends and the rule that picks one.

A backend attends C queries to P + C consecutive keys that end with the last query, each query
seeing itself and the ``window - 1`` tokens before it (all of them if ``window`` is None):

    backend(q (B, H, C, D), k (B, Hkv, P + C, D), v, window) -> (B, H, C, D)
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvlab.model.backends import blocked, flex, sdpa

Backend = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]

BACKENDS: dict[str, Backend] = {
    "sdpa": sdpa.attend,
    "blocked": blocked.attend,
    "flex": flex.attend,
}


def pick_backend(device: torch.device, queries: int, keys: int, window: int | None) -> str:
    """The name of the backend for this shape: no window or a wide one is a plain triangle."""
    if window is None or window >= keys:
        return "sdpa"
    if device.type == "cuda" and queries == keys:
        return "flex"
    return "blocked"


__all__ = ["BACKENDS", "Backend", "pick_backend"]
