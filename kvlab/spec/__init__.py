"""Experiments and sweeps as the user writes them, read from YAML and checked. No torch."""

from kvlab.errors import SpecError
from kvlab.spec.benchmark_config import BenchmarkConfig
from kvlab.spec.data_config import DataConfig
from kvlab.spec.evaluation_config import EvaluationConfig
from kvlab.spec.experiment import Experiment, ServedModel
from kvlab.spec.model_config import ModelConfig
from kvlab.spec.overrides import parse_override
from kvlab.spec.resources_config import ResourcesConfig
from kvlab.spec.serving_config import ServingConfig
from kvlab.spec.spec_loader import load_experiment, load_served_model, load_sweep
from kvlab.spec.sweep import Cell, Sweep
from kvlab.spec.training_config import TrainingConfig

__all__ = [
    "BenchmarkConfig",
    "Cell",
    "DataConfig",
    "EvaluationConfig",
    "Experiment",
    "ModelConfig",
    "ResourcesConfig",
    "ServedModel",
    "ServingConfig",
    "SpecError",
    "Sweep",
    "TrainingConfig",
    "load_experiment",
    "load_served_model",
    "load_sweep",
    "parse_override",
]
