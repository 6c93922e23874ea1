"""Training: optimizer, schedule, loop, checkpoints."""

from kvlab.train.loop import train
from kvlab.train.record import TrainingRecord, load_training
from kvlab.train.weights import final_weights, load_weights

__all__ = ["TrainingRecord", "final_weights", "load_training", "load_weights", "train"]
