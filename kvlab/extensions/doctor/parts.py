"""What `kvlab doctor` adds to kvlab: the command."""

from kvlab.own_extensions import CommandPart, Parts

_SUMMARY = "check whether kvlab can run here"

PARTS = Parts(commands=(CommandPart("doctor", "verify", _SUMMARY),))
