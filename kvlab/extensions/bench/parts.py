"""What `kvlab bench` adds to kvlab: the command."""

from kvlab.own_extensions import CommandPart, Parts

_SUMMARY = "measure memory, latency, throughput and limits"

PARTS = Parts(commands=(CommandPart("bench", "sync", _SUMMARY),))
