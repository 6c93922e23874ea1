"""Experiments and sweeps as the user writes them, read from YAML and checked. No torch."""

from kvlab.spec.data_config import DataConfig as DataConfig
from kvlab.spec.experiment import Experiment as Experiment
from kvlab.spec.model_config import ModelConfig as ModelConfig
from kvlab.spec.overrides import parse_overrides as parse_overrides
from kvlab.spec.resources_config import ResourcesConfig as ResourcesConfig
from kvlab.spec.serving_config import ServingConfig as ServingConfig
from kvlab.spec.spec_loader import load_experiment as load_experiment
from kvlab.spec.spec_loader import load_served_model as load_served_model
from kvlab.spec.spec_loader import load_sweep as load_sweep
from kvlab.spec.sweep import Sweep as Sweep
from kvlab.spec.training_config import TrainingConfig as TrainingConfig
