"""What `kvlab check` adds to kvlab: the command."""

from kvlab.own_extensions import CommandPart, Parts

_SUMMARY = "check what a Python file of `extensions:` adds"

PARTS = Parts(commands=(CommandPart("check", "bench", _SUMMARY),))
