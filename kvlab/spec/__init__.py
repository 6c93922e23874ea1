"""What a person writes: experiments and sweeps, read from YAML and checked. No torch here."""

from kvlab.errors import SpecError
from kvlab.spec.benchmark_config import BenchmarkConfig
from kvlab.spec.experiment import Experiment, ServedModel
from kvlab.spec.model_config import ModelConfig
from kvlab.spec.parts import (
    DataConfig,
    EvaluationConfig,
    ResourcesConfig,
    ServingConfig,
    TrainingConfig,
)
from kvlab.spec.spec_loader import load_experiment, load_served_model, load_sweep, parse_override
from kvlab.spec.sweep import Cell, Sweep

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
