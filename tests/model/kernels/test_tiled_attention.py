"""Attention in tiles against its plain reference; see also the suite of attention backends."""

import torch

from kvlab.model.causal_mask import CausalMask
from kvlab.model.kernels.tiled_attention import tiled_attention
from tests.contracts.attention_backend_contract import random_documents
from tests.contracts.cpu_kernel_contract import CPUKernelContract


class TestTiledAttentionKernel(CPUKernelContract):
    kernel = tiled_attention

    def cases(self):
        torch.manual_seed(0)
        for window in (None, 40):
            for documents in (None, random_documents(300)):
                heads = (4, 2, 2)
                inputs = [torch.randn(2, n, 300, 16).requires_grad_() for n in heads]
                yield [*inputs, CausalMask(window, 0, documents)]
