"""Time several trials again in one session, where every round of the benchmark runs each once.

Speed does not depend on the weights, so the models are initialized anew, and the session needs no
training of the record. The driver keeps its answer if nothing else used the machine.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvlab.humanize import summarize_error
from kvlab.spec import ResourcesConfig
from kvlab.spec.experiment import Experiment
from kvlab.store.provenance import utc_now


@dataclass(frozen=True)
class JointTiming:
    """One task of an executor. Plain data, picklable.

    Attributes:
        seed: of the trials.
        experiments: of the trials, by their ids. What the benchmark measures and where it runs
            are the same in all.
    """

    seed: int
    experiments: Mapping[str, Experiment]

    @property
    def id(self) -> str:
        return f"timing-{self.seed}"

    @property
    def resources(self) -> ResourcesConfig:
        """The resources of a trial, on one whole device."""
        one = next(iter(self.experiments.values())).resources.one_worker
        return one.model_copy(update={"gpus": float(math.ceil(one.devices))})


def run_joint_timing(task: JointTiming, check_stop: Callable[[], None]) -> dict[str, Any]:
    """Time the trials.

    Args:
        check_stop: raises Stopped; called between two turns.

    Returns:
        ``started``, ``finished``, ``device``, ``threads``, ``disturbance`` and ``trials``; or
        ``error``, in a line.
    """
    try:
        return _measure(task, check_stop)
    except Exception as error:
        return {"error": summarize_error(error)}


def _measure(task: JointTiming, check_stop: Callable[[], None]) -> dict[str, Any]:
    import torch

    from kvlab.benchmark.benchmark_stage import time_together
    from kvlab.benchmark.session import Variant
    from kvlab.data.dataset_preparation import prepare_dataset
    from kvlab.model import GPT
    from kvlab.trial.torch_trainable import BENCHMARK_TEXT_TOKENS, set_up_device

    check_stop()
    device, machine = set_up_device(task.resources, task.seed)
    started, first = utc_now(), next(iter(task.experiments.values()))
    variants = []
    for trial, one in task.experiments.items():
        dtype = getattr(torch, one.weight_dtype(device))
        model = GPT(one.model, seed=task.seed).to(device, dtype).eval()
        model.trained_kv = one.training.kv
        variants.append(Variant(trial, model, one.serving))
    tokens: list[int] = []
    if "task" in first.benchmark.parts:
        tokens = prepare_dataset(first.data).train[:BENCHMARK_TEXT_TOKENS].tolist()
    results, disturbance = time_together(
        variants, first.benchmark, on_turn=check_stop, tokens=tokens
    )
    trials = {
        trial: {
            "measurements": results[trial].measurements,
            "benchmark": [
                {**line.model_dump(mode="json", exclude_defaults=True), "variant": experiment.name}
                for line in results[trial].lines
            ],
        }
        for trial, experiment in task.experiments.items()
    }
    return {
        "started": started,
        "finished": utc_now(),
        "device": machine.device,
        "threads": machine.threads,
        "disturbance": disturbance,
        "trials": trials,
    }
