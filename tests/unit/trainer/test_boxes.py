import pytest
import torch

from sft_trainer.boxes import WEIGHT, Box, Rectangle


def test_an_overlap_is_what_two_rectangles_share() -> None:
    left, right = Rectangle((0, 2), (4, 4)), Rectangle((3, 0), (5, 3))
    assert left.overlap(right) == right.overlap(left) == Rectangle((3, 2), (1, 1))
    assert left.overlap(Rectangle((4, 2), (1, 1))) is None
    assert Rectangle((), ()).overlap(Rectangle((), ())) == Rectangle((), ())


def test_a_box_of_a_fused_parameter_is_written_in_place() -> None:
    fused = torch.zeros(2, 6, 3)  # experts, gate and up, hidden
    up = Box("up", WEIGHT, (4, 3, 3), Rectangle((2, 0, 0), (2, 3, 3)), fused[:, 3:])
    up.write(torch.ones(1, 3, 3), Rectangle((3, 0, 0), (1, 3, 3)))
    assert fused[1, 3:].eq(1).all()
    assert fused.sum() == 9
    up.write(torch.full((2, 3, 3), 2.0))
    assert up.read().eq(2).all()
    assert fused[:, :3].eq(0).all()


def test_a_parameter_that_requires_gradients_can_be_written() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    box = Box("p", WEIGHT, (2, 2), Rectangle((0, 0), (2, 2)), parameter)
    box.write(torch.ones(2, 2))
    assert not box.read().requires_grad
    assert parameter.eq(1).all()


def test_a_box_whose_tensor_has_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="weight of p: a box of"):
        Box("p", WEIGHT, (2, 2), Rectangle((0, 0), (1, 2)), torch.zeros(2, 2))
