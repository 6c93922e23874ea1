"""Let this process run as if kvlab's code had been edited."""

from contextlib import contextmanager

import pytest

from kvlab.trial import code_identity
from kvlab.trial.code_identity import CodeIdentity


@contextmanager
def running_code(training: str, measurement: str = "m1"):
    """Let the block run with these digests of the code."""
    with pytest.MonkeyPatch.context() as patch:
        identity = CodeIdentity(training, measurement)
        patch.setattr(code_identity, "read_code", lambda _: identity)
        code_identity.this_code.cache_clear()
        yield
    code_identity.this_code.cache_clear()
