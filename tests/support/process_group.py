"""Two processes that train together over gloo."""

import gc
import socket

import torch
import torch.distributed as dist
from torch import multiprocessing


def run_two(module, work, *arguments):
    """Call ``work(rank, *arguments)`` in two processes. They fork from one that has imported
    ``module``, so that each is there at once."""
    multiprocessing.set_forkserver_preload([module])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    multiprocessing.start_processes(
        _run_worker, (port, work, arguments), nprocs=2, start_method="forkserver"
    )


def _run_worker(rank, port, work, arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    work(rank, *arguments)
    end_group()


def end_group():
    """End the process group, after every reducer of gradients is gone.

    A reducer that owns the group last waits for gloo's threads with the interpreter's lock, which
    they may want.
    """
    gc.collect()
    dist.destroy_process_group()
