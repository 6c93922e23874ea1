"""`adjacent:N`: runs of N layers of one kind share (CLA-N, arXiv 2405.12981).

Counted within each kind in depth order; the last run may be shorter, so the number of owners
rounds up: 20 layers in threes keep 7.
"""

from kvlab.sharing.pattern import Groups, layers_by_kind, whole_number


def groups(argument: str, kinds: str) -> Groups:
    size = whole_number(argument, 1, "adjacent:2")
    return [
        layers[start : start + size]
        for layers in layers_by_kind(kinds)
        for start in range(0, len(layers), size)
    ]
