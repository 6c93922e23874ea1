"""`kvlab submit --detach`: start the driver as a process of its own or as a job of a cluster."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlab.cli.project_folders import default_store, project_path
from kvlab.cli.shared_arguments import read_sweep
from kvlab.cli.sweep_callbacks import COPY_TO_VARIABLE
from kvlab.errors import Problem, SpecError, UsageError
from kvlab.spec import Sweep
from kvlab.spec.overrides import resolve_path_value
from kvlab.spec.yaml_reader import Key, YamlDocument
from kvlab.store import Store
from kvlab.sweep import plan_stage
from kvlab.sweep.executors import EXECUTORS
from kvlab.sweep.ops.detached_driver import create_driver_folder, driver_folder, driver_log

_DRIVER_MODULE = "kvlab.cli.driver_process"


def submit_detached(options: argparse.Namespace) -> int:
    """Check the sweep, start its driver and return 0.

    Raises:
        SpecError: If the sweep is invalid, or names files that the cluster would not find.
        UsageError: If the cluster cannot share the store.
        ResourceError: If the cluster has no job server.
    """
    sweep = read_sweep(options.sweep, options.scale)
    facts = _start_job(options, sweep) if options.address else _start_process(options, sweep)
    if options.json:
        print(json.dumps({"sweep": sweep.name, **facts}, indent=1))
        return 0
    if options.address:
        flags = f" --address {options.address}"
    else:
        flags = "" if options.store == default_store() else f" --store {options.store}"
    print(f"{sweep.name}: {facts['totals']}")
    location = f"job {facts['job']} at {options.address}" if options.address else facts["place"]
    print(f"its driver runs detached: {location}")
    for command in (f"status {sweep.name}", f"logs {sweep.name} -f", f"stop {sweep.name}"):
        print(f"  kvlab {command}{flags}")
    return 0


def _start_process(options: argparse.Namespace, sweep: Sweep) -> dict[str, Any]:
    store = Store(Path(options.store).absolute())
    # the driver prepares the text, which can take long
    planned = plan_stage(sweep, store, provisional=True).plan
    number = create_driver_folder(store, sweep.name)
    log = driver_log(store, sweep.name, number)
    command = [sys.executable, "-P", "-m", _DRIVER_MODULE, str(store.path), sweep.name]
    with open(log, "ab") as file:
        process = subprocess.Popen(
            [*command, f"--number={number}", "--", *_strip_detach_option(options)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # so that it outlives the terminal
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    log_as_typed = driver_folder(Store(options.store), sweep.name, number) / log.name
    return {
        "totals": planned.format_totals(),
        "driver": number,
        "process": process.pid,
        "log": str(log),
        "place": f"process {process.pid}, log in {log_as_typed}",
    }


def _start_job(options: argparse.Namespace, sweep: Sweep) -> dict[str, Any]:
    from kvlab.sweep.ops.ray_jobs import STORE_KEY, SWEEP_KEY, RayJobs

    store = options.store
    _check_shared_options(options)
    problems = list(_find_local_paths(sweep))
    if problems:
        raise SpecError(problems)
    planned = plan_stage(
        sweep, Store(store), provisional=True
    ).plan  # the text may be on the cluster alone
    folder, path = _copy_spec_files(sweep)
    reports = "reports" if options.reports == project_path("reports") else options.reports
    reports = reports if os.path.isabs(reports) else f"{store}/{reports}"
    arguments = [path if word == options.sweep else word for word in _strip_detach_option(options)]
    arguments += ["--address", "auto", "--store", store, "--reports", reports]
    try:
        jobs = RayJobs(options.address)
        job = jobs.start(
            lambda name: [_DRIVER_MODULE, store, sweep.name, "--job", name, "--", *arguments],
            files=folder,
            metadata={SWEEP_KEY: sweep.name, STORE_KEY: store},
        )
    finally:
        shutil.rmtree(folder)
    return {"totals": planned.format_totals(), "job": job, "store": store}


def _check_shared_options(options: argparse.Namespace) -> None:
    """Check that a job on the cluster can use the store, the executor and the backup folder.

    Raises:
        UsageError: If it cannot.
    """
    if not os.path.isabs(options.store):
        text = f"store = {options.store} is a folder of this machine"
        raise UsageError(f"{text}; name one that the cluster shares, such as --store /shared/runs")
    url = options.copy_to
    is_typed = url and url != os.environ.get(COPY_TO_VARIABLE)  # the variable does not travel
    if is_typed and "://" not in url and not os.path.isabs(url):
        text = f"--copy-to = {url} is a folder of this machine, which a job does not run in"
        raise UsageError(f"{text}; write an absolute path that its machines share, or a URL")
    if not EXECUTORS[options.executor].takes_address:
        raise UsageError(f"--executor = {options.executor} runs no cluster; leave it out")


def _strip_detach_option(options: argparse.Namespace) -> list[str]:
    """Return the arguments as typed without ``--detach``, which argparse lets users shorten."""
    words: list[str] = options.words
    return [word for word in words if len(word) < 3 or not "--detach".startswith(word)]


def _copy_spec_files(sweep: Sweep) -> tuple[Path, str]:
    """Copy the sweep and its experiment to a new folder, at the same relative paths.

    Returns:
        The folder, and the path of the sweep in it.
    """
    documents = (sweep.source.document, sweep.source.base_document)
    files = [Path(os.path.abspath(document.file)) for document in documents]
    root = Path(os.path.commonpath([file.parent for file in files]))
    folder = Path(tempfile.mkdtemp(prefix="kvlab-job-"))
    for file, document in zip(files, documents, strict=True):
        target = folder / file.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(document.text, encoding="utf-8")
    return folder, str(files[0].relative_to(root))


def _find_local_paths(sweep: Sweep) -> Iterator[Problem]:
    """Yield a problem for every path in the specs that only this machine can resolve."""
    source = sweep.source
    if os.path.isabs(sweep.experiment):
        text = f"experiment = {sweep.experiment} does not travel as an absolute path; write it"
        yield source.document.problem(("experiment",), f"{text} as seen from the sweep")
    base = source.base_document
    for section, values in base.data.items():
        if isinstance(values, dict):
            for key, value in values.items():
                yield from _check_shared_path(base, (section, key), f"{section}.{key}", value)
    for factor, levels in source.document.data.get("factors", {}).items():
        for level, patch in levels.items():
            for key, value in (patch or {}).items():
                yield from _check_shared_path(
                    source.document, ("factors", factor, level, key), key, value
                )
    for key, values in (sweep.search.choices if sweep.search else {}).items():
        for number, value in enumerate(values):
            yield from _check_shared_path(
                source.document, ("search", "choices", key, number), key, value
            )


def _check_shared_path(
    document: YamlDocument, path: tuple[Key, ...], key: str, value: Any
) -> Iterator[Problem]:
    if resolve_path_value(key, value, Path(os.path.abspath(document.file)).parent) == value:
        return
    text = f"{key} = {value} lies on this machine and does not travel to the cluster"
    yield document.problem(path, f"{text}; write an absolute path that its machines share")
