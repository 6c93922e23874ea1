"""Whether a running trial should go on: asked often, looked up now and then."""

import os
import time
from collections.abc import Callable, Sequence

from kvlab.lease import Fence

STOP_CHECK_SECONDS = 0.2


def stop_check(flags: Sequence[str | None], fences: Sequence[Fence]) -> Callable[[], bool]:
    """Whether one of the flag files is there, looked up a few times a second at most.

    Then it also asks the fences, which raise LeaseLost. It may travel to other processes.
    """
    checked = float("-inf")
    found = False

    def check() -> bool:
        nonlocal checked, found
        if not found and time.monotonic() - checked > STOP_CHECK_SECONDS:
            checked = time.monotonic()
            for fence in fences:
                fence()
            found = any(flag is not None and os.path.exists(flag) for flag in flags)
        return found

    return check
