"""Where the gradients of sources gather while the reads of a model are differentiated, last read first."""

from collections.abc import Sequence

import torch
from torch import Tensor

_OWNED = "_is_depth_gradient_buffer"


class Buffers:
    """One gradient buffer per source of a read, and what later reads left in it.

    A gradient that came straight from the read after this one is a buffer of ours that nobody else should hold: it is
    updated in place, and so changes for a hook that kept it, or for `autograd.grad` with respect to a source that a
    read passed on (not the one that the first read took, whose gradient is final). Any other gradient may be shared
    (autograd hands one tensor to both sides of an addition), so the sum is written to a new tensor; the bytes moved are
    the same. The last source may be the partial sum, whose gradient passes through the write: it is never updated in
    place, unless `no_partial`.

    Attributes:
        add: whether `given` counts; False where no source has a gradient from a later read.
        given: N tensors to add to (any tensor where `add` is False).
        out: N tensors to write, some of them those of `given`.
    """

    def __init__(self, sources: Sequence[Tensor], later: Sequence[Tensor | None], no_partial: bool = False) -> None:
        self.add = any(gradient is not None for gradient in later)
        given, out = [], []
        for n, (source, gradient) in enumerate(zip(sources, later, strict=True)):
            owned = getattr(gradient, _OWNED, False) and (no_partial or n < len(sources) - 1)
            if gradient is None:
                gradient = torch.zeros_like(source) if self.add else source
            elif not (gradient.is_contiguous() and gradient.data_ptr() % 16 == 0):
                gradient = gradient.contiguous().clone()
            given.append(gradient)
            out.append(gradient if owned else torch.empty_like(source))
            setattr(out[-1], _OWNED, True)
        self.given, self.out = tuple(given), tuple(out)


def own_buffer(later: Tensor | None, like: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of what later reads left that may be written to: theirs where it is ours, zeros if they left nothing."""
    if later is None:
        out = like.new_zeros(shape)
    else:
        out = later if getattr(later, _OWNED, False) else later.clone()
    setattr(out, _OWNED, True)
    return out
