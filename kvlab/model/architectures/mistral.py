"""Mistral: Llama whose every layer sees a sliding window (of W tokens, itself included)."""

from typing import Any

from kvlab.model.architectures.llama import Llama
from kvlab.spec.model import ModelConfig


class Mistral(Llama):
    def read_config(self, theirs: dict[str, Any]) -> dict[str, Any]:
        window = theirs.get("sliding_window")
        horizon = {} if window is None else {"attention_pattern": "L", "window": window}
        return {**super().read_config(theirs), **horizon}

    def window_misfits(self, ours: ModelConfig) -> list[str]:
        return [] if set(ours.layer_kinds) == {"L"} else ["some layers are global"]

    def write_config(self, ours: ModelConfig) -> dict[str, Any]:
        theirs = super().write_config(ours)
        for key in ("attention_bias", "mlp_bias"):
            del theirs[key]
        return {
            **theirs,
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": ours.window,
        }
