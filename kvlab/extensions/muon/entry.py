"""`training.optimizer: muon`, without torch."""

from kvlab.spec.training_config import OptimizerEntry

MUON = OptimizerEntry("kvlab.extensions.muon.muon:make_muon", matrix_moments=1)
