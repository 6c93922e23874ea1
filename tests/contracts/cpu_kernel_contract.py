"""What every CPU kernel must do. A member's tests inherit `CPUKernelContract`."""

from abc import ABC, abstractmethod

import pytest
import torch

from kvlab.model.kernels.cpu_kernel import is_plain_code_used, use_plain_code

kernels_on = pytest.mark.skipif(is_plain_code_used(), reason="KVLAB_PLAIN turns the kernels off")


class CPUKernelContract(ABC):
    """Give `kernel` and `cases`, and how near to the plain code it comes."""

    kernel: object
    tolerance = 1e-5
    is_here = True
    """Whether this machine's torch has what the kernel needs."""

    @abstractmethod
    def cases(self):
        """Return lists of arguments for which the kernel is fast; gradients are computed where
        one of them requires its own."""

    def run(self, args):
        """The result of the kernel, and the gradient of each argument that requires one."""
        copies = [_copy(argument) for argument in args]
        with _gradient_mode(args):
            out = self.kernel(*copies)
        if out.requires_grad:
            torch.manual_seed(1)
            out.backward(torch.randn(out.shape, dtype=out.dtype))
        gradients = [c.grad for c in copies if isinstance(c, torch.Tensor) and c.requires_grad]
        return [out.detach(), *gradients]

    def test_it_agrees_with_its_plain_reference_forward_and_backward(self):
        for args in self.cases():
            fast = self.run(args)
            with use_plain_code():
                plain = self.run(args)
                with torch.no_grad():
                    assert torch.equal(self.kernel(*args), self.kernel.plain(*args)), "bit for bit"
            for left, right in zip(fast, plain, strict=True):
                assert left.dtype == right.dtype
                assert left.shape == right.shape
                scale = max(1.0, right.abs().max().item()) if right.numel() else 1.0
                assert not right.numel() or (left - right).abs().max() < self.tolerance * scale

    @kernels_on
    def test_the_cases_run_the_fast_code_until_it_is_switched_off(self):
        if not self.is_here:
            pytest.skip("torch has not what it needs")
        for args in self.cases():
            with _gradient_mode(args):
                assert self.kernel.is_fast(*args)
                with use_plain_code():
                    assert not self.kernel.is_fast(*args)
                assert self.kernel.is_fast(*args)


def _copy(argument):
    if not isinstance(argument, torch.Tensor):
        return argument
    return argument.detach().clone().requires_grad_(argument.requires_grad)


def _gradient_mode(args):
    needs_gradient = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    return torch.set_grad_enabled(needs_gradient)
