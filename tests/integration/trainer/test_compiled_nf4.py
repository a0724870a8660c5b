"""Weights in 4 bits in compiled layers."""

import pytest
import torch

from sft_trainer.models.grouped_experts import grouped_linear
from sft_trainer.models.nf4 import NF4, linear, pack


def test_a_compiled_product_is_that_of_the_layer() -> None:
    # Compiled code looks values up in one go: what is bounded without a compiler is never there as a whole
    packed, inputs = (
        pack(torch.randn(96, 320, generator=torch.Generator().manual_seed(5)) * 0.02).view(torch.bfloat16),
        torch.randn(7, 320, requires_grad=True),
    )
    compiled = torch.compile(linear, fullgraph=True)
    outputs = [function(inputs, packed, None) for function in (linear, compiled)]
    gradients = [torch.autograd.grad(output.square().sum(), inputs)[0] for output in outputs]
    torch.testing.assert_close(*outputs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("experts", "dtype"), [(0, torch.float32), (0, torch.bfloat16), (4, torch.bfloat16)])
def test_compiled_layers_keep_no_whole_weight_for_the_backward_pass(experts: int, dtype: torch.dtype) -> None:
    # Given layers one behind the other, compiled as one: what both passes compute alike, a compiler may keep
    stack = (experts,) if experts else ()
    shapes = ((128, 64), (64, 128), (192, 64), (64, 192))
    matrices = [pack(torch.randn(*stack, *shape)).view(dtype) for shape in shapes]
    ends = torch.tensor([5, 5, 20, 33], dtype=torch.int32)

    def product(inputs: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        if not experts:
            return linear(inputs, packed, None)
        return grouped_linear(inputs, packed, ends, turned=False, packed=NF4)

    def layers(inputs: torch.Tensor) -> torch.Tensor:
        for first, second in zip(matrices[::2], matrices[1::2], strict=True):
            inputs = inputs + product(torch.nn.functional.silu(product(inputs, first)), second)
        return inputs

    # When they are multiplied with
    kept: list[torch.Tensor] = []
    inputs = torch.randn(33, 64, dtype=dtype, requires_grad=True)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # What is kept is chosen before code is made, which takes long.
        output = torch.compile(layers, backend="aot_eager_decomp_partition")(inputs)
    output.sum().backward()

    # Then all that is kept has the rows of the tokens, or is packed
    others = [each for each in kept if each.shape[0] != len(inputs)]
    assert sum(each.nbytes for each in others) <= sum(each.nbytes for each in matrices) + ends.nbytes
