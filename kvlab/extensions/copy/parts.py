"""What copies of records add to kvlab: the command, and what a submit does as it runs."""

from kvlab.own_extensions import CommandPart, Parts

_SUMMARY = "copy the record to a file or a URL, or restore it"

PARTS = Parts(
    members={"publishers": {"copy": ".publisher:CopyPublisher"}},
    commands=(CommandPart("copy", "sync", _SUMMARY),),
)
