"""What the comparison of sweeps and of records adds to kvlab."""

from kvlab.own_extensions import CommandPart, Parts

_SUMMARY = "compare two sweeps, or two records of one, cell by cell"

PARTS = Parts(commands=(CommandPart("compare", "report", _SUMMARY),))
