"""The table of commands: name -> (module, summary), in the order of `kvlab --help`.

Each command is one module with ``add_arguments(parser)`` and ``run(options) -> exit code``. It is
imported only when its command runs, so `kvlab --help` stays instant. To add a command, write its
module and add a line here.
"""

COMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("kvlab.cli.commands.plan", "list the trials of a sweep, their cost, and what is done"),
    "submit": ("kvlab.cli.commands.submit", "run a sweep; run it again and only the missing runs"),
    "status": ("kvlab.cli.commands.status", "show how far sweeps are"),
    "logs": ("kvlab.cli.commands.logs", "show a trial's log or traceback"),
    "stop": ("kvlab.cli.commands.stop", "stop a running sweep at its next checkpoint"),
    "report": ("kvlab.cli.commands.report", "write a sweep's report again from its record"),
    "compare": (
        "kvlab.cli.commands.compare",
        "two sweeps, or two records of one, cell by cell",
    ),
    "ui": ("kvlab.cli.commands.ui", "browse the results in MLflow"),
    "sync": ("kvlab.cli.commands.sync", "bring MLflow up to date with the store"),
    "copy": ("kvlab.cli.commands.copy", "copy the record to object storage, or back from it"),
    "data": ("kvlab.cli.commands.data", "get and prepare text and evaluation sets"),
    "generate": ("kvlab.cli.commands.generate", "continue a text with a trained model"),
    "bench": ("kvlab.cli.commands.bench", "measure memory, latency, throughput and limits"),
    "export": ("kvlab.cli.commands.export", "write a trial's model as a Hugging Face folder"),
    "estimate": (
        "kvlab.cli.commands.estimate",
        "KV bytes, parameters and FLOPs of a model, exactly",
    ),
    "gc": ("kvlab.cli.commands.gc", "remove from the store what nothing needs any more"),
    "doctor": ("kvlab.cli.commands.doctor", "show what is installed and usable, and what is not"),
    "init": ("kvlab.cli.commands.init", "make a folder with commented example specs"),
    "schema": (
        "kvlab.cli.commands.schema",
        "print the JSON Schema that editors complete YAML with",
    ),
}
