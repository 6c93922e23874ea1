"""Checkpoints of DeepSeek-V2 against `transformers`."""

import pytest

from tests.extensions.published_weights.architecture_contract import HFArchitectureContract
from tests.extensions.published_weights.test_pretrained import LLAMA

transformers = pytest.importorskip("transformers", reason="the independent implementation")


class TestDeepSeekV2(HFArchitectureContract):
    model_type = "deepseek_v2"
    unsupported = (
        ({"first_k_dense_replace": 1}, "first_k_dense_replace = 1 is not supported; only 3"),
        ({"v_head_dim": 16}, "v_head_dim = 16 is not supported; only 8 is"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type = yarn is not supported"),
    )

    def reference_models(self):
        for heads, latent, rotary, query in ((4, 24, 6, None), (2, 10, 4, 12)):
            shape = {**LLAMA, "num_attention_heads": heads, "num_key_value_heads": heads}
            config = transformers.DeepseekV2Config(
                **shape | {"rms_norm_eps": 1e-6}, q_lora_rank=query, kv_lora_rank=latent,
                qk_nope_head_dim=8, qk_rope_head_dim=rotary, v_head_dim=8, first_k_dense_replace=3,
            )  # fmt: skip
            yield transformers.DeepseekV2ForCausalLM(config)
