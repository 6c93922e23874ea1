"""What `kvlab explain` adds to kvlab: the command, and what `kvlab plan` says of changes."""

from kvlab.own_extensions import CommandPart, Parts

_SUMMARY = "show what a trial, a cell or a level is computed from, and its files"

_CHANGES = "kvlab.extensions.explain.changes"

PARTS = Parts(
    members={
        "plan_options": {"why": f"{_CHANGES}:add_option"},
        "plan_outlooks": {
            "unmatched": f"{_CHANGES}:list_unmatched",
            "why": f"{_CHANGES}:explain_missing_result",
        },
    },
    commands=(CommandPart("explain", "report", _SUMMARY, "kvlab.extensions.explain.command"),),
)
