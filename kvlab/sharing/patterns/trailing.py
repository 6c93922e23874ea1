"""`trailing:K`: the last K layers read the last owner of their kind below them.

The top layers reuse what the lower ones computed, as in YOCO (arXiv 2405.05254) and Gemma 3n.
"""

from kvlab.sharing.pattern import Groups, SharingError, layers_by_kind, whole_number


def groups(argument: str, kinds: str) -> Groups:
    last = whole_number(argument, 1, "trailing:4")
    first_consumer = len(kinds) - last
    found = []
    for layers in layers_by_kind(kinds):
        owners = [layer for layer in layers if layer < first_consumer]
        consumers = [layer for layer in layers if layer >= first_consumer]
        if consumers and not owners:
            kind = "global" if kinds[consumers[0]] == "G" else "local"
            raise SharingError(
                f"leaves no {kind} owner below the last {last} of {len(kinds)} layers;"
                f" use a number up to {len(kinds) - 1 - layers[0]}"
            )
        if consumers:
            found.append([owners[-1], *consumers])
    return found
