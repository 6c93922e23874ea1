"""What published weights add to kvlab."""

from kvlab.own_extensions import CommandPart, Parts

_SUMMARY = "write the model of a trial as a Hugging Face folder"
_CODE = (".architectures", ".conversion", ".deepseek", ".files", ".pretrained", ".tokenizer")

PARTS = Parts(
    members={
        "checkpoints": {
            "load": ".pretrained:load_pretrained",
            "save": ".pretrained:save_pretrained",
            "shape": ".pretrained:read_shape",
            "identify": ".files:identify_checkpoint",
            "tokenizer": ".tokenizer:load_checkpoint_tokenizer",
            "has_tokenizer": ".tokenizer:has_tokenizer",
            "vocabulary": ".tokenizer:find_vocabulary",
            "identify_tokenizer": ".tokenizer:identify_tokenizer",
        }
    },
    commands=(CommandPart("export", "bench", _SUMMARY),),
    training_code=_CODE,
)
