"""Fixtures that tests of several packages use."""

from contextlib import nullcontext

import pytest


@pytest.fixture(params=["kernels", "plain"])
def code_path(request):
    """Run the test with the CPU kernels, and again with plain PyTorch in their place."""
    from kvlab.model.kernels import use_plain_code

    with use_plain_code() if request.param == "plain" else nullcontext():
        yield request.param
