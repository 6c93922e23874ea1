"""Quality of a model: loss, HellaSwag and probes, one-shot and through the serving cache."""

from kvlab.evaluate.evaluation import Evaluation, evaluate

__all__ = ["Evaluation", "evaluate"]
