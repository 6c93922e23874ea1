"""What published weights add to kvlab."""

from kvlab.own_extensions import CommandPart, Parts

_SUMMARY = "write the model of a trial as a Hugging Face folder"
_CODE = (".architectures", ".conversion", ".deepseek", ".files", ".pretrained")

PARTS = Parts(
    members={
        "checkpoints": {
            "load": ".pretrained:load_pretrained",
            "save": ".pretrained:save_pretrained",
            "identify": ".files:identify_checkpoint",
        }
    },
    commands=(CommandPart("export", "bench", _SUMMARY),),
    training_code=_CODE,
)
