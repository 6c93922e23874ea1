"""A model whose weights are large enough that a wrong path through it shows."""

import torch

from kvlab.model import GPT


def random_model(config, *, seed=0, dtype=torch.float64, std=0.2):
    """Return a model with normal noise added to every initial parameter."""
    model = GPT(config, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed + 5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise * std)
    return model
