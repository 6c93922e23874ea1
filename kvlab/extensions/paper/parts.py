"""What papers add to kvlab: the command that writes their LaTeX."""

from kvlab.own_extensions import CommandPart, Parts

_SUMMARY = "write LaTeX and PDF files for a paper: table, figures, methods, references"

PARTS = Parts(commands=(CommandPart("paper", "report", _SUMMARY, ".paper"),))
