"""What the care of datasets adds to kvlab: the command."""

from kvlab.own_extensions import CommandPart, Parts

_SUMMARY = "get and prepare text and evaluation sets"

PARTS = Parts(commands=(CommandPart("data", "sync", _SUMMARY),))
