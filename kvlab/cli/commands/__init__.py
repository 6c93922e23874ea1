"""The table of commands: name -> (module, summary), in the order of `kvlab --help`.

Each command is one module with ``add_arguments(parser)`` and ``run(options) -> exit code``. It is
imported only when its command runs, so `kvlab --help` stays instant. To add a command, write its
module and add a line here.
"""

COMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("kvlab.cli.commands.plan", "list the trials of a sweep, their cost and state"),
    "submit": ("kvlab.cli.commands.submit", "run what is missing of a sweep, and write its report"),
    "status": ("kvlab.cli.commands.status", "show the progress of sweeps"),
    "logs": ("kvlab.cli.commands.logs", "show the log or traceback of a trial"),
    "stop": ("kvlab.cli.commands.stop", "stop a running sweep at its next checkpoint"),
    "report": ("kvlab.cli.commands.report", "write the report of a sweep again"),
    "compare": (
        "kvlab.cli.commands.compare",
        "compare two sweeps, or two records of one, cell by cell",
    ),
    "explain": (
        "kvlab.cli.commands.explain",
        "show what a trial, a cell or a level is computed from, and its files",
    ),
    "findings": (
        "kvlab.cli.commands.findings",
        "write what the records say of the claims in reports/claims.yaml",
    ),
    "ui": ("kvlab.cli.commands.ui", "browse the results in MLflow"),
    "sync": ("kvlab.cli.commands.sync", "bring MLflow up to date with the store"),
    "copy": (
        "kvlab.cli.commands.copy",
        "copy the record to a file or a URL, or restore it",
    ),
    "data": ("kvlab.cli.commands.data", "get and prepare text and evaluation sets"),
    "generate": ("kvlab.cli.commands.generate", "continue a text with a trained model"),
    "bench": ("kvlab.cli.commands.bench", "measure memory, latency, throughput and limits"),
    "export": ("kvlab.cli.commands.export", "write the model of a trial as a Hugging Face folder"),
    "estimate": (
        "kvlab.cli.commands.estimate",
        "compute exact KV bytes, parameters and FLOPs of a model",
    ),
    "verify": (
        "kvlab.cli.commands.verify",
        "check every file of the record, and move aside what is damaged",
    ),
    "gc": ("kvlab.cli.commands.gc", "show or remove what nothing in the store needs any more"),
    "doctor": ("kvlab.cli.commands.doctor", "check whether kvlab can run here"),
    "init": ("kvlab.cli.commands.init", "make a folder with commented example specs"),
    "metrics": (
        "kvlab.cli.commands.metrics",
        "list every measurement: unit, how it is taken, where it appears",
    ),
    "schema": (
        "kvlab.cli.commands.schema",
        "describe every key of the YAML files, or print their JSON Schema",
    ),
}
