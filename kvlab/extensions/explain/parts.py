"""What `kvlab explain` adds to kvlab: the command, and what `kvlab plan` says of changes."""

from kvlab.own_extensions import CommandPart, Parts

_SUMMARY = "show what a trial, a cell or a level is computed from, and its files"

PARTS = Parts(
    members={
        "plan_options": {"why": ".changes:add_option"},
        "plan_outlooks": {
            "unmatched": ".changes:list_unmatched",
            "why": ".changes:explain_missing_result",
        },
    },
    commands=(CommandPart("explain", "report", _SUMMARY),),
)
