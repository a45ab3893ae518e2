"""Text out of a decoder, one token at a time."""

import torch
from torch import Tensor

from lit_msar.model import Decoder


def check_sampling(max_new_tokens: int, temperature: float, top_p: float) -> None:
    """Raise ValueError for a sampling option out of range."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if temperature < 0:
        raise ValueError(f"temperature must not be negative (0 takes the likeliest token), got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p}")


@torch.no_grad()
def generate(
    model: Decoder,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_id: int | None = None,
    max_context: int | None = None,
) -> Tensor:
    """Continue each row of tokens; every step runs a full forward.

    Args:
        tokens: [B, T] int64, T at least 1.
        temperature: of the softmax; 0 takes the likeliest token.
        top_p: smallest set of tokens whose probability reaches this is sampled from.
        stop_id: rows end at this id; the rest of a row that ended is filled with it.
        max_context: tokens the model looks back at most; None for all.
    Returns:
        [B, T + n] with n <= max_new_tokens.
    """
    check_sampling(max_new_tokens, temperature, top_p)
    generator = torch.Generator(device=tokens.device).manual_seed(seed)
    ended = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    for _ in range(max_new_tokens):
        context = tokens if max_context is None else tokens[:, -max_context:]
        logits = model(context).logits[:, -1].float()  # [B, V]
        picked = pick(logits, temperature, top_p, generator)
        if stop_id is not None:
            picked = torch.where(ended, stop_id, picked)
            ended |= picked == stop_id
        tokens = torch.cat([tokens, picked.unsqueeze(1)], dim=1)
        if stop_id is not None and ended.all():
            break
    return tokens


def pick(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    """One token id per row of logits [B, V]."""
    if temperature == 0:
        return logits.argmax(-1)
    ordered, ids = (logits / temperature).softmax(-1).sort(dim=-1, descending=True)
    # a token stays if what is likelier than it does not reach top_p yet, so the first always stays
    ordered = ordered * (ordered.cumsum(-1) - ordered < top_p)
    return ids.gather(-1, torch.multinomial(ordered, 1, generator=generator)).squeeze(-1)
