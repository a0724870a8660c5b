"""The tensors of a model that files hold, as the modules of one process have them."""

from collections.abc import Iterator

import torch

from sft_trainer.boxes import WEIGHT, Box, Rectangle, boxes_in

from .causal_lm import CausalLM


def stored_tensors(model: CausalLM) -> Iterator[tuple[str, torch.Tensor]]:
    """Name in the Hugging Face model, and tensor, of all that checkpoints and hub files hold of ``model``.

    A tied weight is there once. What is sharded is given as it is.
    """
    huggingface = model.huggingface
    yield from huggingface.named_parameters()
    # Buffers that are computed are in no file, and not in this either.
    stored = huggingface.state_dict(keep_vars=True)
    yield from ((name, buffer) for name, buffer in huggingface.named_buffers() if name in stored)


def tied_names(huggingface: torch.nn.Module) -> dict[str, str]:
    """Of every parameter that has a second name, that and its first, under which ``stored_tensors`` has it."""
    first = {parameter: name for name, parameter in huggingface.named_parameters()}
    every = huggingface.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in every if first[parameter] != name}


def whole_boxes(model: CausalLM) -> list[Box]:
    """All of the parameters and stored buffers of ``model``, which lies in one process, or on the meta device."""
    return [
        box
        for name, tensor in stored_tensors(model)
        for box in boxes_in(
            model.names.parts(name, tuple(tensor.shape)), WEIGHT, Rectangle.whole(tuple(tensor.shape)), tensor.detach()
        )
    ]
