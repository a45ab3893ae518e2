"""The same decoder in transformers, as a yardstick for the backbone's speed: Glm4Moe, grouped_mm experts, pure bf16."""

import statistics

import torch
from torch import nn

from lit_msar.model import DecoderConfig
from lit_msar.training.bench import Clock


def glm4moe(config: DecoderConfig, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """transformers' Glm4MoeForCausalLM of a decoder's shape: sigmoid router, QK-norm, full rotary, untied head.

    Raises:
        ImportError: transformers (extra `dev`) is not installed.
    """
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    shape = Glm4MoeConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.d_ff,
        first_k_dense_replace=config.n_dense_layers,
        n_routed_experts=config.n_experts,
        num_experts_per_tok=config.top_k,
        n_shared_experts=config.n_shared_experts,
        moe_intermediate_size=config.d_expert,
        use_qk_norm=True,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": 1.0},
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
        use_cache=False,
    )
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Glm4MoeForCausalLM(shape)
    finally:
        torch.set_default_dtype(previous)


def peer_step_seconds(
    config: DecoderConfig, tokens: torch.Tensor, warmup: int, steps: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[float, float | None]:
    """Median seconds of a whole training step, and its peak memory in GiB on a GPU; nothing is read between steps.

    Args:
        tokens: [B, T + 1] ids, on the device of the measurement.
        dtype: of weights, activations and AdamW's moments alike.
    """
    model = glm4moe(config, tokens.device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    is_cuda, clock = tokens.device.type == "cuda", Clock(tokens.device)
    for step in range(warmup + steps):
        if step == warmup:
            clock.read()
            if is_cuda:
                torch.cuda.reset_peak_memory_stats()
        clock.start("step")
        logits = model(input_ids=tokens[:, :-1]).logits
        nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        del logits
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    seconds = [parts["step"] for parts in clock.read()]
    peak = torch.cuda.max_memory_allocated() / 2**30 if is_cuda else None
    return statistics.median(seconds), peak
