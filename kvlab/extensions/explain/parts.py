"""What `kvlab explain` adds to kvlab: the command."""

from kvlab.own_extensions import CommandPart, Parts

_SUMMARY = "show what a trial, a cell or a level is computed from, and its files"

PARTS = Parts(
    commands=(CommandPart("explain", "report", _SUMMARY, "kvlab.extensions.explain.command"),)
)
