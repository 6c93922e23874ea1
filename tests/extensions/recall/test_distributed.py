"""Two processes of which one has more answers than the other: the gradient is that of one."""

import json

import torch
import torch.distributed as dist
from torch import multiprocessing

from kvlab.model import GPT
from kvlab.train.train_step import TrainStepper
from tests.extensions.recall.recalls import experiment
from tests.extensions.recall.test_training import plain_loss, step_batch, uneven
from tests.train.test_distributed import free_port


def two():
    of = experiment()
    return experiment(resources={"workers": 2, "microbatch_tokens": 2 * of.model.block_size})


def worker(rank, port, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    of = two()
    stepper = TrainStepper(GPT(of.model, seed=0).double(), uneven(of), of, seed=0)
    stepper.connect_workers()
    loss = stepper.accumulate_gradient(0).item()
    if rank == 0:
        gradient = torch.cat([p.grad.flatten() for p in stepper.model.parameters()])
        path.write_text(json.dumps([loss, stepper.validation_loss(), *gradient.tolist()]))
    else:
        stepper.validation_loss()
    dist.destroy_process_group()


def test_two_workers_weigh_by_their_answers(tmp_path):
    multiprocessing.set_forkserver_preload([__name__])
    path = tmp_path / "found.json"
    multiprocessing.start_processes(
        worker, (free_port(), path), nprocs=2, start_method="forkserver"
    )
    loss, validation, *gradient = json.loads(path.read_text())
    of = two()
    x, y = step_batch(of, uneven(of))
    alone = experiment()
    stepper = TrainStepper(GPT(of.model, seed=0).double(), uneven(of), alone, seed=0)
    counts = [stepper.loss.count_targets(part) for part in y.split(4)]
    assert counts[0] != counts[1]
    expected = plain_loss(of, stepper.model, x, y)
    expected.backward()
    plain = torch.cat([p.grad.flatten() for p in stepper.model.parameters()])
    assert abs(loss - expected.item()) < 1e-6
    assert (torch.tensor(gradient, dtype=torch.float64) - plain).abs().max() < 1e-10
    assert abs(validation - stepper.validation_loss()) < 1e-6
