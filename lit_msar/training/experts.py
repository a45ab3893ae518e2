"""Expert parallelism: every rank of a group holds a part of the experts, and tokens travel to them and back.

Letters: M rows sorted by expert, E experts, P ranks of the group, each with E / P experts in a row.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from lit_msar.model.moe import ApplyExperts, Experts


def spread_experts(experts: Experts, mesh: DeviceMesh) -> None:
    """Leave this rank its part of the experts, as DTensors over the one-dimensional `mesh`.

    Raises:
        ValueError: the ranks do not divide the experts.
    """
    if experts.n_experts % mesh.size():
        raise ValueError(
            f"expert_parallel={mesh.size()} must divide n_experts={experts.n_experts}: every rank holds equally many"
        )
    for name, parameter in list(experts.named_parameters(recurse=False)):
        part = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
        setattr(experts, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    experts.exchange = Exchange(mesh)


class Exchange:
    """Carries rows to the ranks of their experts and the outputs back; no row is dropped, the counts vary per step."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.n_ranks = mesh.get_group(), mesh.size()

    def __call__(self, rows: Tensor, ends: Tensor, apply: ApplyExperts) -> Tensor:
        """Outputs [M, D] of rows [M, D] sorted by expert, whose rows end at `ends` [E]; `apply` runs the local experts.

        The counts cross to the host once: an all-to-all needs its sizes there.
        """
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).view(self.n_ranks, -1)  # [P to, E / P]
        arriving = torch.empty_like(counts)  # [P from, E / P]
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
        rows = _AllToAll.apply(rows, sent, received, self.group)  # sorted by (rank, expert)
        local = torch.arange(arriving.shape[1], device=rows.device).repeat(self.n_ranks)
        experts, order = local.repeat_interleave(arriving.flatten(), output_size=rows.shape[0]).sort(stable=True)
        inverse = torch.empty_like(order).scatter(0, order, torch.arange(order.numel(), device=order.device))
        local_ends = torch.searchsorted(experts, local[: arriving.shape[1]], right=True)
        rows = _Reorder.apply(apply(_Reorder.apply(rows, order, inverse), local_ends), inverse, order)
        return _AllToAll.apply(rows, received, sent, self.group)


class _Reorder(torch.autograd.Function):
    """`rows[order]` of a permutation; the backward gathers too, so it repeats bit for bit."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx, grad: Tensor):
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None


class _AllToAll(torch.autograd.Function):
    """Sends `sent[p]` rows to rank p and takes `received[p]` from it; the gradient travels the other way."""

    @staticmethod
    def forward(ctx, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        sent, received = ctx.sizes
        return _all_to_all(grad, received, sent, ctx.group), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    output = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
    return output
