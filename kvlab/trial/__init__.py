"""One trial: its identity, its training and measurement. Importing needs no torch."""

from kvlab.trial.fingerprint import training_fingerprint, trial_fingerprint
from kvlab.trial.trial import Trial

__all__ = ["Trial", "training_fingerprint", "trial_fingerprint"]
