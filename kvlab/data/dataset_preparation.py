"""Prepare datasets: text to tokens on disk, once for each text and tokenizer."""

import hashlib
import json
import logging
import os
import shutil
import time
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import numpy as np

from kvlab.data import shards, token_pieces
from kvlab.data.data_dir import ProgressCallback, get_data_dir, hold_lock, ignore_progress
from kvlab.data.dataset_builder import select_documents, write_dataset
from kvlab.data.shards import Dataset, DatasetFacts
from kvlab.data.sources import get_source
from kvlab.data.token_pieces import DocumentTable, PieceJob
from kvlab.data.tokenizers import load_tokenizer
from kvlab.errors import DataError, DatasetDamaged, StoreError
from kvlab.fs.atomic_files import replace_file
from kvlab.fs.lease import Fence
from kvlab.fs.sealed_files import set_aside
from kvlab.humanize import format_bytes, format_duration
from kvlab.machine import cpu_count
from kvlab.spec import DataConfig
from kvlab.spec.data_config import find_entry
from kvlab.spec.source_options import TextPart

RECIPE = 2
"""Increased when the same text gives other tokens: reading, selection, order or split changed."""

REPORT_SECONDS = 1.0

_log = logging.getLogger(__name__)

SMALL_TEXT_BYTES = 10_000_000
"""A text of fewer bytes is tokenized in one process, and already by a plan."""


def dataset_identity(data: DataConfig) -> str:
    """Return 64 hex digits that name a prepared dataset: those of the text and of its settings.

    Equal digits mean equal tokens. Equal tokens may have several, such as after another release of
    a package; the digest of the tokens tells what a trial reads (`DatasetFacts`). The text's
    contents count, not where it lies. Nothing is tokenized.
    """
    parts = [[dataset_identity(part.data), part.first_id] for part in _list_others(data)]
    facts = {
        "recipe": RECIPE,
        "source": str(data.source),
        "text": parts or get_source(data.source).identity(data),
        "tokenizer": data.tokenizer_identity,
        "max_bytes": data.max_bytes,
        "validation_fraction": data.validation_fraction,
    }
    if data.max_tokens is not None:
        facts["max_tokens"] = data.max_tokens
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def prepare_dataset(
    data: DataConfig, progress: ProgressCallback | None = None, *, workers: int | None = None
) -> Dataset:
    """Return the tokens of ``data`` from the data folder; tokenize the text if they are missing.

    The result depends on ``data`` and the text alone, not on ``workers`` or on interruptions. If
    several processes prepare the same dataset, one does and the others wait.

    Args:
        workers: Processes to tokenize in; default one per available CPU.

    Raises:
        DataError: The text is missing, damaged or too short, or the disk is full.
    """
    progress = progress or ignore_progress
    if data.has_checkpoint_tokenizer:
        load_tokenizer(data.tokenizer)  # which may download it
    identity = dataset_identity(data)
    folder = _datasets_dir() / identity[:16]
    dataset = _try_open(folder, identity)
    if not isinstance(dataset, Dataset):
        with hold_lock(_beside(folder, "lock"), progress, "prepares this text") as fence:
            dataset = _try_open(folder, identity)
            if isinstance(dataset, DatasetDamaged):
                aside = set_aside(folder.parent, [folder.name], fence)
                text = f"{dataset}; moved to {aside}, the text is prepared again"
                progress(text)
                _log.warning(text)
            if not isinstance(dataset, Dataset):
                _build_dataset(data, identity, progress, workers, fence)
        dataset = shards.open_dataset(folder)
    if data.licence is None or _list_others(data):
        return dataset
    return replace(dataset, licence=data.licence)  # which is not part of the identity


def find_dataset(data: DataConfig) -> DatasetFacts | None:
    """Return the facts of a prepared dataset; None if it is still to be prepared.

    A damaged one is prepared again.
    """
    try:
        return shards.read_dataset_facts(dataset_folder(data))
    except (FileNotFoundError, DatasetDamaged):
        return None


def is_small_text(data: DataConfig) -> bool:
    """Return whether a text is so small that one process prepares it in some seconds."""
    if others := _list_others(data):
        return all(is_small_text(part.data) for part in others)
    size = get_source(data.source).text_bytes(data)
    return size is not None and size < SMALL_TEXT_BYTES


def _list_others(data: DataConfig) -> tuple[TextPart, ...]:
    """Return the sources that the source of ``data`` is made of; empty if it is a text itself."""
    return data.parts if find_entry(data.source).divide else ()


def dataset_folder(data: DataConfig) -> Path:
    """Return where the prepared tokens of ``data`` are, or will be."""
    return _datasets_dir() / dataset_identity(data)[:16]


def list_prepared_datasets() -> list[Path]:
    """Return the folders of all complete datasets, sorted."""
    folders = sorted(_datasets_dir().glob("[!.]*"))
    return [folder for folder in folders if os.path.lexists(folder / "manifest.json")]


def set_aside_dataset(folder: Path) -> Path | None:
    """Move a damaged dataset into ``damaged/`` beside it, so that it is prepared again.

    Returns:
        Where it is now; None if it is not damaged, as another process has prepared it again.
    """
    with hold_lock(_beside(folder, "lock"), ignore_progress, "changes this text"):
        if not shards.verify_dataset(folder):
            return None
        try:
            return set_aside(folder.parent, [folder.name]) / folder.name
        except StoreError as error:
            raise DataError(str(error)) from None


def _datasets_dir() -> Path:
    return get_data_dir() / "datasets"


def _beside(folder: Path, kind: str) -> Path:
    """Return a dataset's ``lock``, or ``work``: the folder of its pieces and unfinished files."""
    return folder.with_name(f".{folder.name}.{kind}")


def _try_open(folder: Path, identity: str) -> Dataset | DatasetDamaged | None:
    """Return the dataset in ``folder``, what is wrong with it, or None if there is none."""
    try:
        dataset = shards.open_dataset(folder)
    except FileNotFoundError:
        return DatasetDamaged(f"{folder} has no manifest") if folder.exists() else None
    except DatasetDamaged as error:
        return error
    if dataset.identity != identity:
        return DatasetDamaged(f"{folder} holds another text")
    return dataset


def _build_dataset(
    data: DataConfig, identity: str, progress: ProgressCallback, workers: int | None, fence: Fence
) -> None:
    """Build the folder in one step; the pieces and unfinished files lie in a folder beside it.

    Of a text of several sources these are prepared, and the function that the table of sources
    names joins them. It has the folder, ``data``, the identity and the `Dataset` of each.
    """
    for other in list_prepared_datasets():  # of a kill between the last two steps
        shutil.rmtree(_beside(other, "work"), ignore_errors=True)
    folder = _datasets_dir() / identity[:16]
    work = _beside(folder, "work")
    complete = work / "whole"
    shutil.rmtree(complete, ignore_errors=True)
    started = time.monotonic()
    if others := [prepare_dataset(p.data, progress, workers=workers) for p in _list_others(data)]:
        complete.mkdir(parents=True)
        resolve_name(find_entry(data.source).factory)(complete, data, identity, others)
        fence.check()
    else:
        complete.mkdir(parents=True)
        processes = workers or (1 if is_small_text(data) else cpu_count())
        jobs = _tokenize(data, work / "pieces", progress, fence, processes)
        fence.check()
        write_dataset(complete, data, identity, jobs, processes)
    replace_file(complete, folder, fence)
    shutil.rmtree(work, ignore_errors=True)
    splits = shards.read_manifest(folder)["splits"].values()
    tokens, documents = (sum(split[key] for split in splits) for key in ("tokens", "documents"))
    seconds = time.monotonic() - started
    progress(f"{tokens:,} tokens of {documents:,} documents in {seconds:.1f} s: {folder}")


# Pieces


def _tokenize(
    data: DataConfig, folder: Path, progress: ProgressCallback, fence: Fence, processes: int
) -> list[PieceJob]:
    """Tokenize the units of a text in order; return the jobs that its limit needs."""
    source = get_source(data.source)
    most = data.max_bytes if data.max_tokens is None else data.max_tokens
    limit = _Limit(data, most) if source.is_shuffled and most is not None else None
    total, column = (limit.maximum, limit.column) if limit else (source.text_bytes(data), "bytes")
    meter = ThroughputMeter(column, total, progress)
    units = source.units(data, progress)
    jobs = (PieceJob(data.source, data.tokenizer, str(folder), unit) for unit in units)
    pending: deque[tuple[PieceJob, bool, Future[None] | None]] = deque()
    done: list[PieceJob] = []
    with token_pieces.tokenizer_pool(processes) as pool:
        # Just enough to keep every process busy: the next unit may need a download.
        max_pending = 1 if pool is None else 2 * cpu_count()
        while True:
            while len(pending) < max_pending and (job := next(jobs, None)) is not None:
                is_new, written = not job.is_written, None
                if pool is None:
                    token_pieces.write_piece(job, fence)
                else:
                    written = pool.submit(token_pieces.write_piece, job, fence)
                pending.append((job, is_new, written))
            if not pending:
                return done
            job, is_new, future = pending.popleft()
            if future is not None:
                future.result()
            job.unit.pop("documents", None)  # of a user's source: all would fill the memory
            done.append(job)
            table = token_pieces.read_document_table(job)
            counts = {name: int(table[name].sum(dtype=np.uint64)) for name in ("bytes", "tokens")}
            meter.add(counts, is_new=is_new)
            if limit and limit.is_reached_with(table):
                return done


class _Limit:
    """Count distinct documents up to ``max_tokens`` or ``max_bytes``."""

    def __init__(self, data: DataConfig, maximum: int):
        self.column = "bytes" if data.max_tokens is None else "tokens"
        self.maximum = self._needed = maximum
        self._tables: list[DocumentTable] = []
        self._read = 0

    def is_reached_with(self, table: DocumentTable) -> bool:
        """Add a piece's documents; return whether the limit is reached.

        Repeated documents do not count. They are looked for only when enough has been read, and
        again when as much more as they leave missing.
        """
        self._tables.append(table)
        self._read += int(table[self.column].sum(dtype=np.uint64))
        if self._read < self._needed:
            return False
        tables = np.concatenate(self._tables)
        selected, _ = select_documents(tables, is_shuffled=True, max_bytes=None)
        missing = self.maximum - int(selected[self.column].sum(dtype=np.uint64))
        self._needed = self._read + max(0, missing)
        return missing <= 0


class ThroughputMeter:
    """Report the text done, the rate, and the time left.

    Args:
        column: What ``total`` counts: bytes of text, or tokens.
    """

    def __init__(self, column: str, total: float | None, progress: ProgressCallback):
        self._column, self._total, self._progress = column, total, progress
        self._done, self._new = Counter[str](), Counter[str]()
        self._started = self._reported = time.monotonic()

    def add(self, counts: dict[str, int], *, is_new: bool) -> None:
        """Count the bytes and tokens of one unit.

        Args:
            is_new: Whether this run made it. Units of an earlier, interrupted run say nothing
                about the rate of this one.
        """
        self._done.update(counts)
        self._new.update(counts if is_new else {})
        now = time.monotonic()
        if now - self._reported < REPORT_SECONDS:
            return
        self._reported, seconds = now, now - self._started
        line = f"tokenizing: {format_bytes(self._done['bytes'])} of text"
        if self._new["bytes"]:
            line += f", {format_bytes(self._new['bytes'] / seconds)}/s"
        line += f", {self._done['tokens'] / 10**6:,.1f} million tokens"
        done, new = self._done[self._column], self._new[self._column]
        if self._total is not None and new and done < self._total:
            line += f", about {format_duration((self._total - done) * seconds / new)} left"
        self._progress(line)
