"""One training in several processes of one machine, under Ray Train's TorchTrainer.

The trial's own Ray task holds all of its GPUs and CPUs, for both stages. The workers run inside
of that: they ask Ray for nothing but to be on this machine, and each takes the GPU of its rank.
So a waiting trainer can never block the trial that it belongs to. Imports ray where it runs.
"""

import json
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvlab import errors
from kvlab.errors import KvlabError, LeaseLost, ResourceError, WorkerLost
from kvlab.fs.atomic_files import read_json, write_json
from kvlab.fs.lease import Fence
from kvlab.store.progress import ProgressUpdate, write_progress
from kvlab.trial.trial import Trial

_RELAY_SECONDS = 0.5
_PROGRESS_FILE = "progress.json"


def train_ddp(
    trial: Trial,
    directory: Path,
    report: Callable[[ProgressUpdate], None],
    should_stop: Callable[[], bool],
    fence: Fence | None = None,
) -> None:
    """Trains ``trial`` into ``directory`` with its ``training_workers``; see `kvlab.train.train`.

    Raises:
        ResourceError: this process is not a part of a Ray cluster.
        WorkerLost: a worker died.
        KvlabError: what the workers raised.
    """
    import ray

    if not ray.is_initialized():
        workers = trial.experiment.resources.training_workers
        text = f"{workers} workers train together under Ray, and this process runs without it"
        raise ResourceError(f"{text}; use --executor ray, or one GPU and resources.workers: 1")
    folder = directory.absolute() / "together"
    _check(fence)
    shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was killed
    folder.mkdir(parents=True)
    task = {"trial": trial, "directory": str(directory.absolute()), "should_stop": should_stop}
    task["fence"] = fence
    try:
        with _ProgressRelay(folder / _PROGRESS_FILE, report):
            _run_trainer({**task, "folder": str(folder)}, trial, folder)
    except Exception as error:
        raise read_worker_error(folder) or error from None
    finally:
        _check(fence)
        shutil.rmtree(folder, ignore_errors=True)


def _check(fence: Fence | None) -> None:
    if fence is not None:
        fence.check()


def _run_trainer(task: dict[str, Any], trial: Trial, folder: Path) -> None:
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")  # read when ray.train is imported
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    resources = trial.experiment.resources
    here = f"node:{ray.util.get_node_ip_address()}"  # type: ignore[no-untyped-call]  # Ray's
    threads = max(1, int(resources.cpus) // resources.training_workers)
    # Ray shows a worker that asks for no GPU what the environment says
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    environment = {"OMP_NUM_THREADS": str(threads)}
    if resources.devices and visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    trainer = TorchTrainer(
        _run_worker,
        train_loop_config={**task, "threads": threads},
        torch_config=TorchConfig(backend="nccl" if resources.devices else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=resources.training_workers,
            resources_per_worker={"CPU": 0, here: 0.001},
        ),
        run_config=RunConfig(  # type: ignore[call-arg]  # typed as the older of Ray's two
            name=f"kvlab-{trial.training_id}",
            storage_path=str(folder / "ray"),
            failure_config=FailureConfig(max_failures=0),  # kvlab owns retries
            worker_runtime_env={"env_vars": environment},
        ),
    )
    trainer.fit()


def _run_worker(task: dict[str, Any]) -> None:
    """One worker, from its start to its end."""
    import torch
    import torch.distributed as dist

    from kvlab.data import prepare_dataset
    from kvlab.model import GPT
    from kvlab.train import train
    from kvlab.trial.initial_weights_loader import InitialWeightsLoader

    trial, folder, directory = task["trial"], Path(task["folder"]), Path(task["directory"])
    experiment, rank = trial.experiment, dist.get_rank()
    mark_worker_started(folder, rank)
    torch.set_num_threads(task["threads"])
    device = f"cuda:{rank}" if experiment.resources.devices else "cpu"
    if experiment.resources.devices:
        torch.cuda.set_device(rank)

    def report(update: ProgressUpdate) -> None:
        write_progress(folder / _PROGRESS_FILE, update, task["fence"])

    try:
        train(
            GPT(experiment.model, seed=trial.seed).to(device),
            prepare_dataset(experiment.data),
            experiment,
            seed=trial.seed,
            directory=directory,
            device=device,
            on_progress=report,
            should_stop=task["should_stop"],
            initial_weights=None
            if trial.initial_weights is None
            else InitialWeightsLoader(trial.initial_weights, directory, report, task["fence"]),
            until=trial.until,
            fence=task["fence"],
        )
    except Exception as error:
        write_worker_error(folder, rank, error)
        raise


class _ProgressRelay:
    """Passes on what the first worker reports, from a thread of this process."""

    def __init__(self, path: Path, report: Callable[[ProgressUpdate], None]):
        self._path, self._report = path, report
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvlab-relay", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._pass_on(None)

    def _run(self) -> None:
        last: ProgressUpdate | None = None
        while not self._over.wait(_RELAY_SECONDS):
            last = self._pass_on(last)

    def _pass_on(self, last: ProgressUpdate | None) -> ProgressUpdate | None:
        # a lost lease is found by the training itself
        with suppress(FileNotFoundError, json.JSONDecodeError, LeaseLost):
            found: ProgressUpdate = json.loads(self._path.read_text())
            if found != last:
                self._report(found)
            return found
        return last


# Why workers that train together ended: each writes down the error that ends it.
#
# What the trainer says is not enough: when one worker is killed, the next one's connection breaks,
# and whichever the trainer sees first is what it tells.


_KVLAB_ERROR, _PEER_LOST, _OTHER_ERROR = "ours", "peer", "other"
_PEER_LOST_TEXTS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")
"""What gloo says, as a plain RuntimeError, when another worker is gone."""


def mark_worker_started(folder: Path, rank: int) -> None:
    """Says that worker ``rank`` runs: what ends it from now on ends a training."""
    (folder / f"{rank}-began").touch()


def write_worker_error(folder: Path, rank: int, error: Exception) -> None:
    """Writes down what ended worker ``rank``, before the trainer hears of it and ends the rest."""
    facts = {
        "kind": _classify_worker_error(error),
        "error": type(error).__name__,
        "text": str(error),
    }
    write_json(folder / f"{rank}-end.json", facts)


def _classify_worker_error(error: Exception) -> str:
    if isinstance(error, KvlabError):
        return _KVLAB_ERROR
    from torch.distributed import DistError

    lost = isinstance(error, DistError) or any(text in str(error) for text in _PEER_LOST_TEXTS)
    return _PEER_LOST if lost else _OTHER_ERROR


def read_worker_error(folder: Path) -> KvlabError | None:
    """The first worker's error of ours, as the exception that it was; else, if workers began and
    none has a reason of its own, `WorkerLost`; None: it is as the trainer says."""
    found = [read_json(path) for path in sorted(folder.glob("*-end.json"))]
    for facts in found:
        if facts["kind"] == _KVLAB_ERROR:
            kind: type[KvlabError] = getattr(errors, facts["error"])
            return kind(facts["text"])
    if any(facts["kind"] == _OTHER_ERROR for facts in found) or not any(folder.glob("*-began")):
        return None
    return WorkerLost("a process of its training died")
