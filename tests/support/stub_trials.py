"""Stub trials, which take no time: real recording and locking around files."""

import hashlib
import json
import os
import signal
import time
from pathlib import Path

from kvlab.data.shards import DatasetFacts
from kvlab.errors import Diverged, Stopped
from kvlab.fs.atomic_files import replace_file
from kvlab.fs.sealed_files import check_file, read_sealed_json, seal_file, write_sealed_json
from kvlab.spec import load_sweep
from kvlab.store.provenance import DataProvenance, Machine, Origin
from kvlab.store.result import TrialMeasurements
from kvlab.sweep import Driver, plan
from kvlab.sweep.executors.inline import InlineExecutor
from kvlab.trial.code_identity import this_code
from kvlab.trial.run import run_task

EXPERIMENT = """\
name: tiny
model: {vocab_size: 257, block_size: 8, n_layer: 2, n_head: 2, n_embd: 8}
data: {tokenizer: bytes}
training: {tokens: 320, batch_tokens: 16}
benchmark: {prompt_tokens: 4, new_tokens: 4}
"""

SWEEP = """\
question: What does it cost?
experiment: e.yaml
factors:
  heads:
    mha: {}
    mqa: {model.n_kv_head: 1}
  serving:
    plain: {}
    tied: {serving.tie: "adjacent:2"}
seeds: [0, 1]
"""

FINAL_WEIGHTS = "final/model.safetensors"


def write_sweep(folder: Path, text: str = SWEEP, name: str = "s.yaml") -> Path:
    (folder / "e.yaml").write_text(EXPERIMENT)
    (folder / name).write_text(text)
    return folder / name


def write_many(folder: Path, count: int) -> Path:
    """Write a sweep of ``count`` trials that train one step each, with ten seeds per cell."""
    rates = "".join(
        f"    r{n}: {{training.learning_rate: {1e-4 * (n + 1):.6f}}}\n" for n in range(count // 10)
    )
    text = f"question: q\nexperiment: e.yaml\nfactors:\n  rate:\n{rates}seeds: {list(range(10))}\n"
    (folder / "e.yaml").write_text(EXPERIMENT.replace("tokens: 320", "tokens: 16"))
    path = folder / f"s{count}.yaml"
    path.write_text(text)
    return path


def identify(data) -> DatasetFacts:
    return DatasetFacts("text of " + data.source, 10**12, 10**9, 10**9)


def tiny_plan(folder: Path, store=None, text: str = SWEEP):
    return plan(load_sweep(write_sweep(folder, text)), store, identify=identify)


class StubTrainable:
    """Count steps in a file. ``script`` maps (trial id, train or measure, step) to an act."""

    def __init__(self, trial, report, *, flag, seconds=0.0, script=None):
        self.trial, self.report, self.seconds = trial, report, seconds
        self.flag, self.script = flag, script or {}

    def train(self, directory, should_stop, fence):
        checkpoint = directory / "checkpoint"
        step = int(checkpoint.read_text()) if checkpoint.exists() else 0
        while step < self.trial.experiment.training.steps:
            self.act("train", step)
            step += 1
            time.sleep(self.seconds)
            write_whole(checkpoint, str(step), fence)
            with open(directory / "steps.log", "a") as log:
                log.write(f"{step}\n")
            self.report({"stage": "training", "step": step, "steps": 20, "loss": 1.0 / step})
            if should_stop():
                raise Stopped("asked to stop")
        (directory / "final").mkdir(exist_ok=True)
        write_whole(directory / "final" / "model.safetensors", self.weights(), fence)
        files = {name: seal_file(directory / name) for name in ("config.json", FINAL_WEIGHTS)}
        content = {"files": files, "code": [this_code().training]}
        write_sealed_json(directory / "training.json", content, fence=fence)

    def measure(self, directory, kept):  # noqa: ARG002
        self.act("measure", 0)
        self.report({"stage": "evaluation"})
        path = directory / "final" / "model.safetensors"
        check_file(path, read_sealed_json(directory / "training.json")["files"][FINAL_WEIGHTS])
        weights = path.read_text()
        drawn = int(hashlib.sha256((weights + self.trial.id).encode()).hexdigest()[:8], 16) / 2**32
        return TrialMeasurements(
            measurements={"loss": self.loss(drawn), "kv_bytes_formula": 64},
            curves={"train_loss": [[20, 320, drawn]], "validation_loss": []},
            training_record={"steps": 20, "seconds": 0.5},
            machine=Machine("stub", 1),
            data=DataProvenance("0" * 64, self.trial.data_identity, "none", "bytes"),
            items=[{"ind": 1, "correct": True}],
        )

    def loss(self, drawn):
        """Return the loss that is measured: by default one that is drawn from the weights."""
        return drawn

    def weights(self):
        return f"weights of {self.trial.training_id}"

    def act(self, kind, step):
        match self.script.get((self.trial.id, kind, step)):
            case "bug":
                raise ValueError(f"no way to {kind} from /home/somebody/file")
            case "diverge":
                raise Diverged("loss is nan at step 3")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                marker = Path(self.flag).with_name(f"hung-{self.trial.id}")
                if not marker.exists():
                    marker.touch()
                    time.sleep(600)
            case "memory":
                raise MemoryError
            case "kill once" | "terminate once" as act:
                marker = Path(self.flag).with_name(f"killed-{self.trial.id}")
                if not marker.exists():
                    marker.touch()
                    number = signal.SIGKILL if act == "kill once" else signal.SIGTERM
                    os.kill(os.getpid(), number)
            case "stop":
                Path(self.flag).touch()


def write_whole(path: Path, text: str, fence=None) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    replace_file(temporary, path, fence)


class StubRun:
    """Run trials with stub trainables; picklable, for workers in other processes."""

    trainable: type[StubTrainable] = StubTrainable

    def __init__(self, store, name="s", own_flag=None, **options):
        self.store, self.options, self.own_flag = str(store), options, own_flag
        self.flag = str(Path(store) / "sweeps" / name / "stop")

    def __call__(self, trial):
        return run_task(
            trial, self.store, origin=Origin(command="kvlab submit s.yaml"),
            stop_flags=[flag for flag in (self.flag, self.own_flag) if flag],
            make_trainable=self.make, wait=False,
        )  # fmt: skip

    def make(self, trial, report):
        return self.trainable(trial, report, flag=self.flag, **self.options)


def drive(planned, store, run, **options):
    """Run a plan on the inline executor; return the driver's summary."""
    return Driver(planned, store, InlineExecutor(run), **options).run()


def read_numbers(store, planned) -> dict:
    """Return the status and measurements of every trial, without what differs between runs."""
    found = {}
    for one in planned.trials:
        result = store.result(one.trial.id)
        found[one.trial.id] = result and (result["status"], json.dumps(result["measurements"]))
    return found
