"""What sharing tokens among processes needs of a model, and what a compiler is told of it."""

import pytest
import torch
import torch.distributed as dist
from torch import library

from sft_trainer.errors import ConfigError
from sft_trainer.models.exchange import check_heads, shared_tokens, to_heads, to_tokens


@pytest.mark.usefixtures("process_group")
def test_a_compiler_is_told_the_shapes_and_gradients_that_there_are() -> None:
    group, degree, _ = shared_tokens(dist.group.WORLD, dist.get_rank())
    by_tokens = [torch.randn(1, 6, n, 16) for n in (4, 2, 2)]
    tensors = [tensor.transpose(1, 2).requires_grad_() for tensor in by_tokens]
    library.opcheck(to_heads, (tensors, group, degree))
    library.opcheck(to_tokens, (tensors, group, degree))


class Config:
    def __init__(self, heads: int, kv_heads: int | None) -> None:
        self.num_attention_heads, self.num_key_value_heads = heads, kv_heads
        self.model_type = "llama"


def test_heads_that_cannot_be_shared_out_are_refused_with_those_degrees_that_can() -> None:
    for degree in (1, 2, 4, 8, 16, 32):
        check_heads(Config(32, 8), degree, 32)
    check_heads(Config(12, None), 6, 6)
    with pytest.raises(
        ConfigError, match=r"sequenceParallelDegree is 4, .* 14 attention heads of the model: set it to 1 or 2$"
    ):
        check_heads(Config(14, 2), 4, 8)
    # 3 divides the heads of queries, and goes with 2 heads of keys in no way
    with pytest.raises(
        ConfigError,
        match=r"is 3, which neither divides the 2 heads of keys of the .* set it to 1, 2, 4, 6 or 12$",
    ):
        check_heads(Config(12, 2), 3, 12)
    with pytest.raises(ConfigError, match=r"set it to 1$"):
        check_heads(Config(14, 2), 3, 3)


def test_heads_are_shared_out_in_layers_of_every_kind() -> None:
    from transformers import AutoConfig

    heads = {"num_attention_heads": 12, "num_key_value_heads": 6, "num_global_key_value_heads": 4}
    config = AutoConfig.for_model("gemma4_text", **heads, attention_k_eq_v=True)
    check_heads(config, 2, 12)
    # 6 divides the heads of keys of layers with windows, and goes with the 4 of the others in no way
    with pytest.raises(ConfigError, match=r"is 6, which neither divides the 4 heads of keys .* set it to 1, 2 or 12$"):
        check_heads(config, 6, 12)
