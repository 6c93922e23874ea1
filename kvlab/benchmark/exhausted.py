"""What libraries raise when memory is gone, as one error that names what was asked for."""

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from kvlab.benchmark.session import Session
from kvlab.errors import ResourceError
from kvlab.memory_errors import memory_gone


@contextmanager
def naming_what_did_not_fit(session: Session) -> Iterator[None]:
    """Raises ResourceError where memory ran out, with what the session was doing."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not memory_gone(error):
            raise
        raise _does_not_fit(session, session.doing) from None


def check_room(session: Session) -> None:
    """Looks before a system that promises memory freely ends the process over it.

    Raises:
        ResourceError: the caches of a batch alone are more than the device has free.
    """
    free = _free_bytes(session.device)
    settings = session.settings
    length = settings.prompt_tokens + settings.new_tokens
    for batch in settings.batches:
        # all variants' caches are there at once, since they take turns
        needed = sum(
            each.layout.stored_bytes(batch, length, each.dtype) for each in session.variants
        )
        if needed > free:
            caches = f"its caches take {needed:,} bytes where {free:,} are free"
            raise _does_not_fit(session, f"batch {batch}", f": {caches}")


def _does_not_fit(session: Session, doing: str, why: str = "") -> ResourceError:
    way_out = "measure fewer variants, or a smaller model"
    if "batch" in doing:
        way_out = "use smaller --batches, or fewer variants at once; --only limit finds the largest"
    elif "prompt" in doing:
        way_out = "use shorter --contexts, or fewer variants at once"
    return ResourceError(f"{doing} does not fit on this {session.device.type}{why}; {way_out}")


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available + psutil.swap_memory().free)
