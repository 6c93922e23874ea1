"""The attention backends and the rule that picks one.

A backend attends C queries to P + C consecutive keys that end with the last query, each query
seeing itself and the ``window - 1`` tokens before it (all of them if ``window`` is None), but
none of another document if ``documents`` part the row (P is 0 then):

    backend(q (B, H, C, D), k (B, Hkv, P + C, D), v, window, documents) -> (B, H, C, D)
"""

from collections.abc import Callable

from torch import Tensor

from kvlab.cache import Documents
from kvlab.model.backends import blocked, flex, kept, sdpa

Backend = Callable[[Tensor, Tensor, Tensor, int | None, Documents | None], Tensor]

BACKENDS: dict[str, Backend] = {
    "sdpa": sdpa.attend,
    "blocked": blocked.attend,
    "flex": flex.attend,
    "kept": kept.attend,
}


def pick_backend(q: Tensor, keys: int, window: int | None, has_documents: bool = False) -> str:
    """The name of the backend for queries (B, H, C, D) on so many keys: no window or a wide one
    is a plain triangle, unless documents part it."""
    if kept.suits(q, keys, window):
        return "kept"
    is_wide = window is None or window >= keys
    if q.device.type == "cuda" and q.shape[2] == keys and (has_documents or not is_wide):
        return "flex"
    return "sdpa" if is_wide else "blocked"


__all__ = ["BACKENDS", "Backend", "pick_backend"]
