"""Training: the loop, one optimizer step, the learning-rate schedule and checkpoints."""

from kvlab.train.loop import train
from kvlab.train.tensor_files import load_final_weights, read_final_weights
from kvlab.train.training_record import TrainingRecord, load_training_record

__all__ = [
    "TrainingRecord",
    "load_final_weights",
    "load_training_record",
    "read_final_weights",
    "train",
]
