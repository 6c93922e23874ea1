"""One trial: what identifies it, how it runs, and its record on disk. Importing needs no torch."""

from kvlab.store.store import Store
from kvlab.trial.fingerprint import training_fingerprint, trial_fingerprint
from kvlab.trial.trial import Trial

__all__ = ["Store", "Trial", "training_fingerprint", "trial_fingerprint"]
