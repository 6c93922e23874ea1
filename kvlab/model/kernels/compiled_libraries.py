"""What `torch.compile` keeps on disk, what a killed compiler has left, and how long it took."""

from pathlib import Path


def remove_torn_libraries() -> None:
    """Remove libraries that were never finished: Inductor would load them, and fail each time.

    A linker writes the first bytes of a library last. One that a process is making at this moment
    stays.
    """
    from filelock import FileLock, Timeout
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # which takes a second

    for library in Path(cache_dir()).glob("*/*.so"):
        lock = library.parents[1] / "locks" / f"{library.name.split('.')[0]}.lock"
        try:
            with FileLock(lock, timeout=0), library.open("rb") as file:
                is_torn = not file.read(4).strip(b"\0")
                if is_torn:
                    library.unlink()
        except (Timeout, OSError):
            pass  # it is being made, or another process has removed it


def read_compile_seconds() -> float:
    """Return how long this process has compiled since `torch.compiler.reset`."""
    from torch._dynamo.utils import calculate_time_spent

    return calculate_time_spent()["total_wall_time"]
