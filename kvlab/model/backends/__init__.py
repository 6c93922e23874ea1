"""The attention backends and the rule that picks one.

A backend attends C queries to P + C consecutive keys that end with the last query, each query
seeing itself and the ``window - 1`` tokens before it (all of them if ``window`` is None):

    backend(q (B, H, C, D), k (B, Hkv, P + C, D), v, window) -> (B, H, C, D)
"""

from collections.abc import Callable

from torch import Tensor

from kvlab.model.backends import blocked, flex, kept, sdpa

Backend = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]

BACKENDS: dict[str, Backend] = {
    "sdpa": sdpa.attend,
    "blocked": blocked.attend,
    "flex": flex.attend,
    "kept": kept.attend,
}


def pick_backend(q: Tensor, keys: int, window: int | None) -> str:
    """The name of the backend for queries (B, H, C, D) on so many keys: no window or a wide one
    is a plain triangle."""
    if kept.suits(q, keys, window):
        return "kept"
    if window is None or window >= keys:
        return "sdpa"
    if q.device.type == "cuda" and q.shape[2] == keys:
        return "flex"
    return "blocked"


__all__ = ["BACKENDS", "Backend", "pick_backend"]
