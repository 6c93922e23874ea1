"""A quantizer: a number of K or V is -1, 0 or 1 times a scale of its vector."""

import torch

from kvlab.extend import Extension, Quantizer


class Ternary(Quantizer):
    name = "ternary"  # a value of kv_dtype

    def find_problem(self, size):
        return None if size % 4 == 0 else "needs a multiple of 4, as a byte holds four codes"

    def stored(self, size):
        return (size // 4, "uint8"), (1, "float16")

    def encode(self, values):
        size = values.double().abs().mean(-1, keepdim=True)  # the same in any order of its sum
        scale = size.clamp(1e-6, 6e4).half()
        codes = (values / scale.float()).round().clamp(-1, 1) + 1
        first, second, third, fourth = codes.to(torch.uint8).chunk(4, -1)
        return first | second << 2 | third << 4 | fourth << 6, scale

    def decode(self, packed, scale):
        codes = torch.cat([packed >> shift & 3 for shift in (0, 2, 4, 6)], -1)
        return (codes.float() - 1) * scale.float()


extension = Extension(quantizers=(Ternary(),))
