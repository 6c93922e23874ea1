"""What a person writes: experiments and sweeps, read from YAML and checked. No torch here."""

from kvlab.errors import SpecError
from kvlab.spec.benchmark import BenchmarkConfig
from kvlab.spec.experiment import Experiment, Shape
from kvlab.spec.load import load_experiment, load_shape, load_sweep, parse_override
from kvlab.spec.model import ModelConfig
from kvlab.spec.parts import (
    DataConfig,
    EvaluationConfig,
    ResourcesConfig,
    ServingConfig,
    TrainingConfig,
)
from kvlab.spec.sweep import Cell, Sweep

__all__ = [
    "BenchmarkConfig",
    "Cell",
    "DataConfig",
    "EvaluationConfig",
    "Experiment",
    "ModelConfig",
    "ResourcesConfig",
    "ServingConfig",
    "Shape",
    "SpecError",
    "Sweep",
    "TrainingConfig",
    "load_experiment",
    "load_shape",
    "load_sweep",
    "parse_override",
]
