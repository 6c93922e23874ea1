"""One trial: its identity, its training and measurement. Importing needs no torch."""

from kvlab.trial.trial import Trial

__all__ = ["Trial"]
