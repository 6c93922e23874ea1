"""The table of commands: name -> summary, in the order of `kvlab --help`.

Each command is the module of its name in this package, or one of an extension, with
``add_arguments(parser)``, ``run(options)``, which returns the exit code where it may be other than
0, and ``EPILOG`` where its help ends with examples. It is imported only when its command runs, so
`kvlab --help` stays instant.
To add a command, write its module and add a line here.
"""

from kvlab.own_extensions import insert_after, load_parts

COMMANDS: dict[str, str] = {
    "plan": "list the trials of a sweep, their cost and state",
    "submit": "run what is missing of a sweep, and write its report",
    "status": "show the progress of sweeps",
    "logs": "show the log or traceback of a trial",
    "stop": "stop a running sweep at its next checkpoint",
    "report": "write the report of a sweep again",
    "ui": "browse the results in MLflow",
    "sync": "bring MLflow up to date with the store",
    "verify": "check every file of the record, and move aside what is damaged",
    "init": "make a folder with commented example specs",
}

MODULES: dict[str, str] = {}
"""Command of an extension -> its module."""

for one in (part for parts in load_parts().values() for part in parts.commands):
    COMMANDS = insert_after(COMMANDS, one.after, {one.name: one.summary})
    MODULES[one.name] = one.module
