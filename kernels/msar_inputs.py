"""What an MSAR read is given, as the kernels take it: the shape of its streams, and sources with their taps.

P = B T tokens, R reads at once, N sources, m streams, K taps, as in `msar_steps`.
"""

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import narrow
from kernels.gradients import Buffers
from kernels.reference import Gate, n_taps
from kernels.tiles import TRITON_DTYPES, check_shapes, check_streams, table

REGISTERS = {8: 255, 12: 168, 16: 128}  # of a thread, for so many warps on an SM


@dataclasses.dataclass(frozen=True)
class Spec:
    """What the kernels of one read are compiled for."""

    kernel_sizes: tuple[int, ...]
    gate: Gate
    eps: float

    @property
    def m(self) -> int:
        return len(self.kernel_sizes)

    @property
    def K(self) -> int:
        return n_taps(self.kernel_sizes)

    @property
    def block_d(self) -> int:
        """Channels per program of one warp: two per lane while taps, their gradients and windows fit in registers."""
        return 64 if self.K + max(self.kernel_sizes) <= 36 and self.m <= 4 else 32


def check_inputs(
    spec: Spec,
    shape: tuple[int, int, int],
    taps: Sequence[Tensor | None],
    queries: Sequence[Tensor],
    mixer: Sequence[Tensor | None] = (None, None, None),
    position: Tensor | None = None,
) -> Tensor | None:
    """`position` [B, T] (or [1, T] for all sequences) as the kernels read it.

    Raises:
        ValueError: streams beyond the kernels' limits, or what does not belong to sources [B, T, D] of this shape.
    """
    check_streams(spec.kernel_sizes)
    (B, T, D), m = shape, spec.m
    if not B * T:
        raise ValueError(f"kernels=triton needs at least one token, got sources {list(shape)}; use kernels=reference")
    for group in taps if spec.K else ():
        check_shapes(taps=(group, (spec.K, D)))
    for query in queries:
        check_shapes(query=(query, (m, D)))
    weight, scale, bias = mixer
    check_shapes(mix_weight=(weight, (m, m, D)), mix_scale=(scale, (1,)), mix_bias=(bias, (m,)))
    if position is None:
        return None
    check_shapes(position=(position, (1, T) if len(position) == 1 else (B, T)))
    return position.expand(B, T).to(torch.int32).contiguous()


class Sources:
    """N sources [B, T, D] with their taps, as the kernels take them."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        taps: Sequence[Tensor],
        position: Tensor | None,
        buffers: Buffers | None = None,
        prepared: Sequence[Tensor | None] | None = None,
    ) -> None:
        """`taps` has one group per source, a single one for all, or none where no stream has any; `buffers` takes
        gradients in the backward pass; `prepared` is that of the same sources in the forward pass."""
        self.tensors, self.position, self.buffers = tuple(tensors), position, buffers
        x, N = self.tensors[0], len(self.tensors)
        half = x.dtype == torch.bfloat16 and N <= narrow.MAX_SOURCES
        self.compute = torch.float16 if half else torch.float32
        self.narrow_taps, *fits = prepared or (None,) * 3
        self._fits = tuple(fits) if half and prepared else None
        groups = tuple(taps) or self.tensors[:1]  # without taps the kernels never follow the address
        if half and taps and self.narrow_taps is None:
            self.narrow_taps = x.new_empty(len(taps), *taps[0].shape, dtype=torch.float16)
        narrowed = groups if self.narrow_taps is None else self.narrow_taps.unbind()
        gradients = () if buffers is None else (buffers.given, buffers.out)
        # rows: sources, taps, taps in the dtype that computes; gradients to add to, gradients to write
        self.table = table(self.tensors, per_source(groups, N), per_source(narrowed, N), *gradients)

    @functools.cached_property
    def norms(self) -> Tensor | None:
        """Sums of |taps| for `narrow`, which fill the fp16 taps on the way; None without taps."""
        if self.narrow_taps is None:
            return None
        return narrow.narrow_taps(self.table, self.narrow_taps, len(self.tensors))

    def fits(self, rstd: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """What `narrow.fit` says of the sources with rstd [N, P, m]; None where fp32 computes."""
        if self.compute == torch.float32:
            return None, None
        if self._fits is None:
            self._fits = narrow.fit(rstd, self.norms, self.tensors[0].shape[-1])
        return self._fits

    @property
    def prepared(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """For the backward pass, after `fits`: taps in fp16 and what it says; None where fp32 computes."""
        assert self._fits is not None or self.compute == torch.float32
        return self.narrow_taps, *(self._fits or (None, None))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, T, D, N."""
        return *self.tensors[0].shape, len(self.tensors)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    def constants(self, spec: Spec, compute: torch.dtype | None = None, warps_per_sm: int | None = None) -> dict:
        """What every kernel over sources is compiled for.

        Args:
            compute: for kernels that have a choice.
            warps_per_sm: 8, 12 or 16 to be resident; the compiler would often rather take more registers.
        """
        choice = {} if compute is None else {"COMPUTE": TRITON_DTYPES[compute]}
        if warps_per_sm is not None:
            choice["maxnreg"] = REGISTERS[warps_per_sm]
        return choice | {
            "SIZES": spec.kernel_sizes,
            "D": self.tensors[0].shape[-1],
            "PACKED": self.position is not None,
            "DTYPE": TRITON_DTYPES[self.dtype],
        }


def per_source(groups: Sequence[Tensor], n_sources: int) -> tuple[Tensor, ...]:
    return tuple(groups) if len(groups) == n_sources else tuple(groups) * n_sources
