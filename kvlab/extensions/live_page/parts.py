"""What the live page adds to kvlab: the command that serves it."""

from kvlab.own_extensions import CommandPart, Parts

_SUMMARY = "follow sweeps on a page while they run: trials, curves, time left"

PARTS = Parts(commands=(CommandPart("live", "ui", _SUMMARY),))
