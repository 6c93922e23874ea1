"""What findings add to kvlab: the command that writes them."""

from kvlab.own_extensions import CommandPart, Parts

_SUMMARY = "write what the records say of the claims in reports/claims.yaml"

PARTS = Parts(commands=(CommandPart("findings", "report", _SUMMARY, ".pages"),))
