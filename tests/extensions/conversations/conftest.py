"""Models to talk with."""

from tests.cli.test_models import checkpoint, model, trial  # noqa: F401
