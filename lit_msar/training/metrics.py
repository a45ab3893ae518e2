"""Token-weighted losses, in total and per data set."""

import math

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_msar.model.loss import IGNORED


class SetLoss(Metric):
    """Sum of losses and count of predicted tokens per data set, over micro-steps and ranks.

    The mean is the sum over tokens over the count of tokens: micro-batches of 1 and 9 valid tokens weigh 1 to 9.
    """

    full_state_update = False

    def __init__(self, n_sets: int) -> None:
        super().__init__()
        # float64: a mean over 1e9 tokens keeps its digits
        self.add_state("nats", torch.zeros(n_sets, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros(n_sets, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, losses: Tensor, targets: Tensor, set_id: Tensor) -> None:
        """Add losses [B, T] (0 where masked) of sequences that belong to sets `set_id` [B]."""
        self.nats.index_add_(0, set_id, losses.detach().double().sum(1))
        self.tokens.index_add_(0, set_id, (targets != IGNORED).sum(1).double())

    def compute(self) -> tuple[Tensor, Tensor]:
        """Nats and tokens, each [n_sets]."""
        return self.nats, self.tokens


def loss_report(
    nats: Tensor, tokens: Tensor, set_names: list[str], bytes_per_token: Tensor, prefix: str
) -> dict[str, float]:
    """Loss, perplexity and bits per byte, in total and for each set that has tokens.

    Args:
        nats: [n_sets] summed loss.
        tokens: [n_sets] predicted tokens.
        bytes_per_token: [n_sets] UTF-8 bytes of text per token.
        prefix: first part of the keys, `train` or `val`.
    Returns:
        `<prefix>/loss`, `<prefix>/perplexity`, `<prefix>/bits_per_byte`, and the same per set as
        `<prefix>_<quantity>/<set name>` where there is more than one set; empty without tokens.
    """
    nats, tokens = nats.cpu(), tokens.cpu()
    n_bytes = tokens * bytes_per_token
    report = _quantities(nats.sum().item(), tokens.sum().item(), n_bytes.sum().item())
    named = {f"{prefix}/{name}": value for name, value in report.items()}
    if len(set_names) > 1:
        for i, set_name in enumerate(set_names):
            values = _quantities(nats[i].item(), tokens[i].item(), n_bytes[i].item())
            named.update({f"{prefix}_{name}/{set_name}": value for name, value in values.items()})
    return named


def _quantities(nats: float, tokens: float, n_bytes: float) -> dict[str, float]:
    if not tokens:
        return {}
    loss = nats / tokens
    quantities = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}  # exp overflows a double past 709
    if n_bytes:
        quantities["bits_per_byte"] = nats / math.log(2) / n_bytes
    return quantities
