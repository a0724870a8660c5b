"""What Megatron-Core's schedule of interleaved stages wants: full groups of micro-batches, and one thing at a time."""

from collections.abc import Iterable
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from sft_trainer.data.batches import empty_micro_batch
from sft_trainer.data.feed import BinTensors


def filled(bins: Iterable[BinTensors], stages: int) -> list[BinTensors]:
    """``bins``, and so many that count nothing that there are a whole number of times as many as ``stages``."""
    every = list(bins)
    return every + [BinTensors.of(empty_micro_batch(), counts=False)] * (-len(every) % stages)


def options(config: TransformerConfig) -> dict[str, Any]:
    """Of the schedule: through whom stages speak, and all groups, which it then wants to be told."""
    return {
        "p2p_communicator": _InTurn(parallel_state.get_pipeline_model_parallel_group(), config),
        "pg_collection": ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "embd", "pos_embd", "pp", "dp_cp"]),
    }


class _InTurn(P2PCommunicator):  # type: ignore[misc]
    """Hidden states first, gradients after them.

    In one call the shapes of both would go together: of two stages each is before and after the other, and takes the
    one for the other. What one stage sends first its neighbour receives first: nobody waits for what comes after.
    """

    def send_forward_backward_recv_forward_backward(
        self, output_tensor: Any, input_tensor_grad: Any, recv_prev: bool, recv_next: bool, tensor_shape: Any
    ) -> tuple[Any, Any]:
        """A hidden state and a gradient; None where nothing is received."""
        hidden = self.send_forward_recv_forward(output_tensor, recv_prev, tensor_shape)
        return hidden, self.send_backward_recv_backward(input_tensor_grad, recv_next, tensor_shape)
