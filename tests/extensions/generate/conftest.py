"""A trial to continue texts with."""

from tests.support.generated import model, trial  # noqa: F401
