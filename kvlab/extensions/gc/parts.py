"""What the removal of garbage adds to kvlab: the command."""

from kvlab.own_extensions import CommandPart, Parts

_SUMMARY = "show or remove what nothing in the store needs any more"

PARTS = Parts(commands=(CommandPart("gc", "verify", _SUMMARY),))
