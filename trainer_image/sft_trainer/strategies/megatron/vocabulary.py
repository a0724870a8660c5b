"""The head of a model whose rows the processes of a group have: what the loss asks of all of them."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class GroupRows:
    """``sft_trainer.loss.Rows`` of this process in ``group``."""

    first: int
    most: int
    vocabulary: int
    group: dist.ProcessGroup

    def log_softmax(self, logits: torch.Tensor) -> torch.Tensor:
        highest = logits.max(dim=-1, keepdim=True).values
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.group)
        total = logits.sub_(highest).exp().sum(dim=-1, keepdim=True)
        self.add_up(total)
        return logits.sub_(total.log_())

    def most_likely(self, log_probabilities: torch.Tensor) -> torch.Tensor:
        highest, place = log_probabilities.max(dim=-1)
        over_all = highest.clone()
        dist.all_reduce(over_all, dist.ReduceOp.MAX, group=self.group)
        token = torch.where(highest == over_all, place + self.first, torch.iinfo(torch.int64).max)
        dist.all_reduce(token, dist.ReduceOp.MIN, group=self.group)
        return token

    def add_up(self, total: torch.Tensor) -> None:
        dist.all_reduce(total, group=self.group)
