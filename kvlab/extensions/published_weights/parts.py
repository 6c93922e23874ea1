"""What published weights add to kvlab."""

from kvlab.own_extensions import CommandPart, Parts

_FOLDER = "kvlab.extensions.published_weights"
_SUMMARY = "write the model of a trial as a Hugging Face folder"
_CODE = tuple(
    f"{_FOLDER}.{name}"
    for name in ("architectures", "conversion", "deepseek", "files", "pretrained")
)

PARTS = Parts(
    members={
        "checkpoints": {
            "load": f"{_FOLDER}.pretrained:load_pretrained",
            "save": f"{_FOLDER}.pretrained:save_pretrained",
            "identify": f"{_FOLDER}.files:identify_checkpoint",
        },
    },
    commands=(CommandPart("export", "bench", _SUMMARY, f"{_FOLDER}.command"),),
    training_code=_CODE,
)
