"""Strategies on the Triton kernels inside a sharded decoder: what one rank does, importable from a new process."""

from pathlib import Path

import torch
from conftest import small_decoder
from torch import Tensor, distributed
from torch.distributed.fsdp import fully_shard

from lit_msar.residual import HC, MHC, MSAR, AttnRes

SIZES = (1, 4, 8, 12)
STRATEGIES = {
    "attnres": lambda kernels: AttnRes(2, kernels=kernels),
    "msar": lambda kernels: MSAR(2, kernel_sizes=SIZES, kernels=kernels, schedule="per_read"),
    "msar_full": lambda kernels: MSAR(1, kernel_sizes=SIZES, kernels=kernels),
    "msar_per_block": lambda kernels: MSAR(4, kernel_sizes=SIZES, kernels=kernels, schedule="per_block"),
    "msar_reader_owned": lambda kernels: MSAR(2, kernel_sizes=SIZES, conv_owner="reader", kernels=kernels),
    "mhc": lambda kernels: MHC(kernels=kernels),
    "hc": lambda kernels: HC(kernels=kernels),
}


def gradients_of_decoder(name: str, tokens: Tensor, is_sharded: bool, kernels: str = "triton") -> dict[str, Tensor]:
    """Gradients of a small fp32 decoder's residual parameters; sharded over all ranks of the process group."""
    decoder = small_decoder(STRATEGIES[name](kernels)).to(tokens.device)
    if is_sharded:
        mesh = distributed.init_device_mesh(tokens.device.type, (distributed.get_world_size(),))
        for layer in decoder.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(decoder, mesh=mesh)
    decoder(tokens).logits.float().sin().sum().backward()
    grads = {name: p.grad for name, p in decoder.named_parameters() if name.startswith("residual.")}
    return {name: grad.full_tensor() if is_sharded else grad for name, grad in grads.items() if grad is not None}


def on_each_rank(rank: int, n_ranks: int, folder: str) -> None:
    """Gradients over this rank's part of `folder/tokens.pt`, averaged by FSDP; the first rank saves them."""
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=n_ranks)
    tokens = torch.load(Path(folder) / "tokens.pt").chunk(n_ranks)[rank].cuda()
    for name in STRATEGIES:
        grads = gradients_of_decoder(name, tokens, is_sharded=True)
        if rank == 0:
            torch.save(grads, Path(folder) / f"{name}.pt")
    distributed.destroy_process_group()
