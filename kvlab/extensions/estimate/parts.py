"""What `kvlab estimate` adds to kvlab: the command."""

from kvlab.own_extensions import CommandPart, Parts

_SUMMARY = "compute exact KV bytes, parameters and FLOPs of a model"

PARTS = Parts(commands=(CommandPart("estimate", "bench", _SUMMARY),))
