#!/usr/bin/env bash
# Trains on the GPUs of one node, or of several, under torchrun; goes on where the run in its directory stopped.
#
#   configs/launch/torchrun.sh --config configs/base.yaml --config configs/size/18b.yaml \
#       --config configs/residual/msar.yaml --config configs/data/pile.yaml --config configs/strategy/fsdp.yaml \
#       --trainer.default_root_dir runs/18b-msar
#   DRY_RUN=1 configs/launch/torchrun.sh ...     print the plan (ranks, mesh, memory, tokens, checkpoint) and stop
#
# On several nodes, run it on each, with NODES, NODE_RANK (0 on the first) and MASTER_ADDR (the first node).
# Other settings: GPUS per node (default: all), MASTER_PORT, GPU_MEMORY (GiB, for the plan), PYTHON.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source configs/launch/environment.sh

python=${PYTHON:-python}
nodes=${NODES:-1}
gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
command=("$python" -m torch.distributed.run --nnodes "$nodes" --nproc_per_node "$gpus" --max_restarts 0)
if [[ $nodes -gt 1 ]]; then
    command+=(--node_rank "${NODE_RANK:?}" --master_addr "${MASTER_ADDR:?}" --master_port "${MASTER_PORT:-29500}")
else
    command+=(--standalone)
fi
fit=(-m lit_msar fit "$@" --trainer.num_nodes "$nodes" --trainer.devices "$gpus" --ckpt_path last)

if [[ ${DRY_RUN:-0} != 0 ]]; then
    "$python" -m lit_msar plan "$@" --gpus $((nodes * gpus)) --gpus_per_node "$gpus" --gpu_memory "${GPU_MEMORY:-80}"
    echo "${command[@]}" "${fit[@]}"
    exit
fi
exec "${command[@]}" "${fit[@]}"
