"""Distributed data-parallel training on one machine, under Ray Train's TorchTrainer.

The trial's Ray task holds all of its GPUs and CPUs, for training and measurement. The workers run
inside of that: they request nothing from Ray but this machine, and each takes the GPU of its rank.
So a trainer that waits for resources can never block the trial that it belongs to.

ray is imported when a training starts, not with this module.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab import errors
from kvlab.errors import KvlabError, ResourceError, WorkerKilled
from kvlab.fs.atomic_files import read_json, write_json
from kvlab.fs.lease import Fence
from kvlab.oom import classify_oom
from kvlab.store.attempt import ProgressUpdate
from kvlab.trial.trial import Trial


@dataclass(frozen=True)
class _WorkerTask:
    """What every worker of a training receives. Picklable.

    ``folder`` holds the workers' errors and Ray's files, until the training ends.
    """

    trial: Trial
    directory: Path
    folder: Path
    threads: int
    report: Callable[[ProgressUpdate], None]
    should_stop: Callable[[], bool]
    fence: Fence


def train_ddp(
    trial: Trial,
    directory: Path,
    report: Callable[[ProgressUpdate], None],
    should_stop: Callable[[], bool],
    fence: Fence,
) -> None:
    """Train ``trial`` into ``directory`` with its ``training_workers``; see `kvlab.train.train`.

    Args:
        report: picklable; the first worker calls it.

    Raises:
        ResourceError: this process does not belong to a Ray cluster.
        WorkerKilled: a worker died.
        KvlabError, MemoryError, torch.OutOfMemoryError: raised by a worker.
    """
    import ray

    resources = trial.resources
    if not ray.is_initialized():
        text = f"{resources.training_workers} workers train together under Ray, and this process"
        hint = "use --executor ray, or one GPU and resources.workers: 1"
        raise ResourceError(f"{text} runs without it; {hint}")
    directory = directory.absolute()
    folder = directory / "together"
    threads = max(1, int(resources.cpus) // resources.training_workers)
    task = _WorkerTask(trial, directory, folder, threads, report, should_stop, fence)
    _clear(folder, fence)  # a killed attempt may have left one
    folder.mkdir(parents=True)
    try:
        _make_trainer(task).fit()
    except Exception as error:
        raise read_worker_error(folder) or error from None
    finally:
        _clear(folder, fence)


def _clear(folder: Path, fence: Fence) -> None:
    fence.check()
    shutil.rmtree(folder, ignore_errors=True)


def _make_trainer(task: _WorkerTask) -> Any:
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")  # read when ray.train is imported
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    resources = task.trial.resources
    this_node = f"node:{ray.util.get_node_ip_address()}"  # type: ignore[no-untyped-call]  # Ray's
    # A worker that requests no GPU from Ray sees those that the environment names.
    own = ("CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_CACHE_DIR")
    environment = {name: os.environ[name] for name in own if name in os.environ}
    environment["OMP_NUM_THREADS"] = str(task.threads)
    return TorchTrainer(
        _run_worker,
        train_loop_config={"task": task},
        torch_config=TorchConfig(backend="nccl" if resources.devices else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=resources.training_workers,
            resources_per_worker={"CPU": 0, this_node: 0.001},
        ),
        run_config=RunConfig(  # type: ignore[call-arg]  # typed as the older of Ray's two
            name=f"kvlab-{task.trial.training_id}",
            storage_path=str(task.folder / "ray"),
            failure_config=FailureConfig(max_failures=0),  # kvlab owns retries
            worker_runtime_env={"env_vars": environment},
        ),
    )


def _run_worker(config: dict[str, Any]) -> None:
    """Train as one worker. Called by Ray Train in a process of its own."""
    import torch
    import torch.distributed as dist

    from kvlab.data.dataset_preparation import prepare_dataset
    from kvlab.trial.initial_weights_loader import train_trial

    task: _WorkerTask = config["task"]
    trial, rank = task.trial, dist.get_rank()
    (task.folder / f"{rank}-began").touch()  # so that its end is the end of a training
    torch.set_num_threads(task.threads)
    device = f"cuda:{rank}" if trial.resources.devices else "cpu"
    if trial.resources.devices:
        torch.cuda.set_device(rank)

    try:
        dataset = prepare_dataset(trial.experiment.data)
        stop, fence = task.should_stop, task.fence
        train_trial(trial, dataset, task.directory, device, task.report, stop, fence)
    except Exception as error:
        write_worker_error(task.folder, rank, error)
        raise


# Why a worker ended. Ray Train's own report does not suffice: when one worker is killed, the
# connections of the others break, and Ray reports whichever end it notices first.

_PEER_LOST_TEXTS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")
"""Parts of the RuntimeError that gloo raises when another worker is gone."""


def write_worker_error(folder: Path, rank: int, error: Exception) -> None:
    """Record the error of worker ``rank``, unless another one's death is the reason.

    It is recorded before Ray Train ends the other workers.
    """
    from torch.distributed import DistError

    name = type(error).__name__ if isinstance(error, KvlabError) else classify_oom(error) or ""
    is_lost = isinstance(error, DistError) or any(t in str(error) for t in _PEER_LOST_TEXTS)
    if name or not is_lost:
        write_json(folder / f"{rank}-end.json", {"error": name, "text": str(error)})


def read_worker_error(folder: Path) -> Exception | None:
    """Return why the workers ended.

    Returns:
        The first worker's `KvlabError` or lack of memory; `WorkerKilled` if workers started and
        none has an error of its own; None if Ray Train's error is the reason.
    """
    import torch

    memory_errors = {"device": torch.OutOfMemoryError, "host": MemoryError}
    ends = [read_json(path) for path in sorted(folder.glob("*-end.json"))]
    for end in ends:
        if name := end["error"]:
            error_class: type[Exception] = memory_errors.get(name) or getattr(errors, name)
            return error_class(end["text"])
    has_died = not ends and any(folder.glob("*-began"))
    return WorkerKilled("a process of its training died") if has_died else None
