"""Text to tokens on disk, once: `prepare`."""

import shutil
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from kvlab.data.assembly import chosen, placed, write_dataset
from kvlab.data.folder import Progress, data_folder, exclusive, silent
from kvlab.data.meter import Meter
from kvlab.data.pieces import Job, read_table
from kvlab.data.room import check_room
from kvlab.data.shards import Dataset, open_dataset, read_manifest
from kvlab.data.sources import SOURCES
from kvlab.data.text_identity import identity
from kvlab.data.workers import Workers, available_cpus
from kvlab.errors import DataError
from kvlab.files import check_guards, replace, write_json
from kvlab.spec import DataConfig


def prepare(
    data: DataConfig, progress: Progress | None = None, *, workers: int | None = None
) -> Dataset:
    """The tokens of ``data``, from the data folder or made now.

    The result depends on ``data`` and the text alone, not on ``workers``, on interruptions or on
    other processes that prepare at the same time: one of them does it, the others wait.

    Args:
        progress: takes lines for a person.
        workers: processes to tokenise in; default one a processor.

    Raises:
        DataError: the text is missing, damaged or too little, or the disk is full.
    """
    report = progress or silent
    name = identity(data)
    folder = _datasets() / name[:16]
    if not _is_there(folder):
        lock = _datasets() / f".{name[:16]}.lock"
        waiting = "another process is preparing this text; waiting"
        with exclusive(lock, report, waiting, guards=_work_folder(folder)):
            if not _is_there(folder):
                _make(data, name, folder, report, workers or available_cpus())
    dataset = open_dataset(folder)
    if dataset.identity != name:
        raise DataError(f"{folder} holds another text; remove it, prepare again")
    if dataset.short is not None:
        report(f"warning: {dataset.short}")
    if data.licence is not None and data.licence != dataset.licence:
        dataset = _relicensed(folder, data.licence, report)
    return dataset


def prepared() -> list[Path]:
    """The folders of all whole datasets, sorted."""
    return sorted(path.parent for path in _datasets().glob("[!.]*/manifest.json"))


def _relicensed(folder: Path, licence: str, report: Progress) -> Dataset:
    """The licence is no part of a text's identity: what was prepared before takes the new one."""
    lock = folder.with_name(f".{folder.name}.lock")
    with exclusive(lock, report, "another process holds this text; waiting"):
        write_json(folder / "manifest.json", {**read_manifest(folder), "licence": licence})
    return open_dataset(folder)


def _datasets() -> Path:
    return data_folder() / "datasets"


def _is_there(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except FileNotFoundError:
        return False
    return True


def _make(data: DataConfig, name: str, folder: Path, report: Progress, workers: int) -> None:
    """Makes ``folder`` appear whole. What is half made waits in a folder beside it."""
    _sweep_up()
    work = _work_folder(folder)
    whole = work / "whole"
    shutil.rmtree(whole, ignore_errors=True)
    check_room(data, folder.parent, work / "pieces")
    whole.mkdir(parents=True)
    started = time.monotonic()
    with Workers(workers) as pool:
        jobs = _Tokenising(data, work / "pieces", report, pool).run()
    source = SOURCES[data.source]
    table = chosen(
        placed(jobs),
        shuffled=source.shuffled,
        max_bytes=data.max_bytes,
        max_tokens=data.max_tokens,
    )
    check_guards(whole)
    write_dataset(whole, data, name, jobs, table)
    replace(whole, folder)
    shutil.rmtree(work, ignore_errors=True)
    tokens = int(table["tokens"].sum())
    seconds = time.monotonic() - started
    report(f"{tokens:,} tokens of {len(table):,} documents in {seconds:.1f} s: {folder}")


def _work_folder(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.work")


def _sweep_up() -> None:
    """Removes what a kill between the last two steps of `_make` left behind."""
    for folder in prepared():
        shutil.rmtree(_work_folder(folder), ignore_errors=True)


class _Tokenising:
    """The pieces of one dataset, made in order by ``pool``."""

    def __init__(self, data: DataConfig, folder: Path, report: Progress, pool: Workers):
        self._data, self._folder, self._report, self._pool = data, folder, report, pool
        self._source = SOURCES[data.source]

    def run(self) -> list[Job]:
        """The jobs done; no more than ``max_bytes`` or, of shuffled text, ``max_tokens`` need."""
        limit = None
        if self._data.max_bytes is not None and not self._source.shuffled:
            limit = self._order_limit(self._data.max_bytes)
        return self._done(limit, survey=False)

    def _order_limit(self, max_bytes: int) -> int:
        """Where the hash order reaches ``max_bytes``: known once every document was seen."""
        table = placed(self._done(None, survey=True))
        taken = chosen(table, shuffled=False, max_bytes=max_bytes)
        return int(taken["order"][-1]) if len(taken) else 0

    def _done(self, limit: int | None, *, survey: bool) -> list[Job]:
        counted = "bytes" if self._data.max_tokens is None else "tokens"
        most = self._data.max_bytes if counted == "bytes" else self._data.max_tokens
        stop_at = most if self._source.shuffled else None
        # what is left is told by what is asked for, or, where all is read, by bytes on disk
        total = stop_at or self._source.size(self._data)
        meter = Meter("reading" if survey else "tokenising", total, self._report)
        jobs = self._jobs(limit, survey)
        waiting: deque[tuple[Job, bool, Future[None]]] = deque()
        done: list[Job] = []
        seen: set[int] = set()
        taken = 0
        # Ahead only as far as keeps every process busy: the next unit may cost a download.
        ahead = 1 if self._pool.count == 1 else 2 * self._pool.count
        while True:
            while len(waiting) < ahead and (job := next(jobs, None)) is not None:
                is_new = not job.table_path.exists()
                waiting.append((job, is_new, self._pool.submit(job)))
            if not waiting:
                return done
            job, is_new, future = waiting.popleft()
            future.result()
            done.append(job)
            table = read_table(job)
            counts = {name: int(table[name].sum()) for name in ("bytes", "tokens")}
            share = counts[counted] if stop_at else job.unit.get("bytes", 0)
            meter.add(counts["bytes"], counts["tokens"], share, is_new=is_new)
            if stop_at is not None:
                for document, size in zip(
                    table["hash"].tolist(), table[counted].tolist(), strict=True
                ):
                    taken += 0 if document in seen else size
                    seen.add(document)
                if taken >= stop_at:
                    return done

    def _jobs(self, limit: int | None, survey: bool) -> Iterator[Job]:
        again = limit is not None  # what there is to say was said by the survey
        for unit in self._source.units(self._data, silent if again else self._report):
            yield Job(
                source=self._data.source,
                tokenizer=self._data.tokenizer,
                folder=str(self._folder),
                unit=unit,
                order_limit=limit,
                survey=survey,
            )
