"""Parameters and FLOPs of a model, exactly. A multiply-add is two FLOPs.

Attention is counted by the full-square convention: a global layer over t tokens scores t x t
pairs, a local one t x min(t, window), masked or not. Norms, softmax and activations are left
out, as is usual. For GPT-2 XL this gives 3,109,942,400 t + 307,200 t^2.

Rotations are left out, too, except of tied keys: they are stored unrotated, so a decode step
rotates all that it reads. Latent attention is counted as it is computed: over a whole text every
head's K and V are made from the latents; a decode step attends to the latents themselves, with
the same maps applied to the query and to the result (DeepSeek-V2, arXiv 2405.04434, section 2.1).
"""

from kvlab.spec.experiment import Experiment
from kvlab.spec.model_config import ModelConfig


def parameter_count(model: ModelConfig) -> int:
    """Return the number of trainable parameters; a tied head counts once."""
    embeddings = model.vocab_size * model.n_embd * (1 if model.tie_embeddings else 2)
    if model.position_scheme.has_embedding:
        embeddings += model.block_size * model.n_embd
    norm = model.n_embd * (2 if model.norm == "layernorm" and model.bias else 1)
    inner = model.ffn_dim * (model.mlp_matrices - 1)
    mlp = model.n_embd * (inner + model.ffn_dim) + (inner + model.n_embd if model.bias else 0)
    total = embeddings + norm + model.n_layer * (mlp + model.norms_per_layer * norm)
    for number, layer in enumerate(model.layers):
        total += layer.mixer.weights(model, number) + layer.mixer.vectors(model, number)
    return total


def non_embedding_parameters(model: ModelConfig) -> int:
    """Return the parameters without the embeddings of tokens and positions, with the output head.

    A tied embedding counts as the head. See `kvlab.extensions.scaling.trends` for why.
    """
    embeddings = 0 if model.tie_embeddings else model.vocab_size * model.n_embd
    if model.position_scheme.has_embedding:
        embeddings += model.block_size * model.n_embd
    return parameter_count(model) - embeddings


def forward_flops(model: ModelConfig, tokens: int) -> int:
    """Return the FLOPs of one forward pass over one sequence of ``tokens`` tokens."""
    mixed = sum(layer.mixer.products(layer, tokens) for layer in model.layers)
    return tokens * 2 * (matrix_weights(model) + mixed)


def training_flops(experiment: Experiment) -> int:
    """Return the FLOPs of the whole training: forward once, backward twice that."""
    model, training = experiment.model, experiment.training
    sequences = training.steps * (training.batch_tokens // model.block_size)
    return 3 * sequences * forward_flops(model, model.block_size)


def training_flops_per_token(model: ModelConfig) -> int:
    """Return the training FLOPs of each token of a sequence of the block size, on average."""
    # every term of a forward pass is a multiple of its tokens, so the division is exact
    return 3 * forward_flops(model, model.block_size) // model.block_size


def matrix_weights(model: ModelConfig) -> int:
    """Return the number of weights that multiply every token: projections, MLPs and the head."""
    layers = (layer_weights(model, layer) for layer in range(model.n_layer))
    return model.vocab_size * model.n_embd + sum(layers)


def layer_weights(model: ModelConfig, layer: int) -> int:
    """Return the number of weights of one layer that multiply every token."""
    mlp = model.n_embd * model.ffn_dim * model.mlp_matrices
    return model.layers[layer].mixer.weights(model, layer) + mlp
