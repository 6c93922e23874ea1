"""Several processes train as one does: two over gloo, against one with accumulation."""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from kvlab.errors import Paused, ResourceError, Stopped
from kvlab.fs.sealed_files import read_sealed_json
from kvlab.train.checkpoint import Trunk
from kvlab.train.loop import train
from kvlab.train.train_step import TrainStepper, WorkerGroup
from kvlab.train.training_record import load_training_record
from tests.support.process_group import end_group, run_two
from tests.support.tiny_training import assert_same_losses, dataset, experiment, model

DATA = dataset()
STEPS = {"tokens": 64 * 40, "evaluate_every": 10, "evaluate_tokens": 160}
SHAPE = {"n_kv_head": 1, "position": "rope", "attention_pattern": "GL", "window": 5}


def worker(rank, directory, of, stop_after, until, trunk):
    # a graph of the whole pass as on a GPU, without the minute that making machine code takes
    torch.compile = partial(torch.compile, backend="aot_eager")
    time.sleep(rank / 4)  # the leader never waits for the others by chance
    calls = iter(range(1, 1000))
    said = []
    try:
        train(
            model(of, seed=rank),  # the leader's weights must win
            DATA,
            of,
            seed=0,
            directory=directory,
            on_progress=said.append,
            should_stop=lambda: next(calls) == stop_after,
            until=until,
            trunk=trunk,
        )
    except Stopped:
        assert stop_after
    except Paused:
        assert until
    assert bool(said) == (rank == 0), "the leader alone speaks"


def test_two_workers_lose_as_one_with_accumulation(tmp_path):
    """They branch from a shared stable phase, stop, pause at a rung of a search, and go on."""
    steps = STEPS | {"schedule": "wsd", "warmup_tokens": 64 * 4, "decay_tokens": 64 * 10}
    longer = experiment(SHAPE, steps | {"tokens": 64 * 60}, resources={"microbatch_tokens": 16})
    trunk = Trunk(tmp_path / "trunk", frozenset([8, 12]))
    with pytest.raises(Paused):
        train(model(longer), DATA, longer, seed=0, directory=tmp_path / "a", until=8, trunk=trunk)
    together = check_two_workers(tmp_path, SHAPE, steps, stop_after=15, until=36, trunk=trunk)
    assert read_sealed_json(tmp_path / "two" / "rungs.json")["rungs"]["36"]["step"] == 36
    assert (together.workers, together.branched_at, len(together.train_curve)) == (2, 8, 40)
    assert together.resumed_from == [8, 23, 36]
    assert trunk.path(12).is_dir(), "they share, too"
    assert together.train_curve[0][2] - together.train_curve[-1][2] > 0.5, "it learnt something"


def check_two_workers(
    folder, shape, steps, tolerance=1e-5, compiled=False, stop_after=0, until=0, trunk=None
):
    """Train by one and by two processes, which may branch, and stop or pause once; compare; return
    the pair's record."""
    resources = {"microbatch_tokens": 16}
    one = experiment(shape, steps, resources=resources)
    both = experiment(shape, {**steps, "compile": compiled}, resources=resources | {"workers": 2})
    alone = train(model(one), DATA, one, seed=0, directory=folder / "one")

    def train_two(stop_after=0, until=None):
        run_two(__name__, worker, folder / "two", both, stop_after, until, trunk)

    for interrupted in ({"stop_after": stop_after}, {"until": until}):
        if any(interrupted.values()):
            train_two(**interrupted)
            assert load_training_record(folder / "two") is None
    train_two()
    together = load_training_record(folder / "two")
    assert_same_losses(together, alone, tolerance)
    return together


@pytest.mark.faults
def test_two_workers_with_a_compiled_pass_lose_as_one_without(tmp_path):
    """Through windows and ties; validation has a batch of fewer rows, which is not compiled."""
    shape = SHAPE | {"n_layer": 4, "attention_pattern": "GLGL", "kv_sharing": "adjacent:2"}
    steps = {**STEPS, "tokens": 64 * 8, "evaluate_every": 4}
    together = check_two_workers(tmp_path, shape, steps, compiled=True)
    assert together.attention == "flash_attention"


@torch._dynamo.config.patch(optimize_ddp=True)  # put back after; monkeypatch would hide it
def test_a_compiled_pass_of_several_workers_is_one_graph(monkeypatch):
    """Of windows, too, and whose parameters fill several buckets of gradients."""
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shape = {**SHAPE, "n_embd": 256, "n_layer": 3}
        of = experiment(shape, {"compile": True})
        stepper = TrainStepper(model(of), DATA, of, seed=0)
        stepper.workers = WorkerGroup(0, 2)
        stepper.connect_workers()
        stepper.loss.compiles = False  # the head is another graph
        stepper.accumulate_gradient(0)
        del stepper
    finally:
        end_group()
    assert len(graphs) == 1


def test_a_training_for_more_workers_than_there_are_is_refused(tmp_path):
    two = experiment(SHAPE, STEPS, resources={"workers": 2, "microbatch_tokens": 16})
    with pytest.raises(ResourceError, match="for 2 workers and runs in 1"):
        train(model(two), DATA, two, seed=0, directory=tmp_path)
