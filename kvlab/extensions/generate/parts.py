"""What `kvlab generate` adds to kvlab: the command."""

from kvlab.own_extensions import CommandPart, Parts

PARTS = Parts(
    commands=(CommandPart("generate", "sync", "continue a text with a trained model", ".command"),)
)
