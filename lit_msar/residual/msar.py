"""Multi-Stream Attention Residuals: depth attention with one head per causal-convolution view of each source."""

import math
from typing import Literal

import torch
from torch import Tensor

from kernels import MAX_READS, Kernels, reference
from kernels.reference import Gate
from lit_msar.initialization import Init, constant, normal
from lit_msar.residual.base import Cost, Site, State
from lit_msar.residual.depth import DepthAttention, joined, split_position

GATE_SCALE = 0.01
WEIGHT_STD = 0.02


def conv_start(conv_init: Literal["uniform", "delta"], kernel_sizes: tuple[int, ...]) -> Init:
    """Start of one conv group [K, D]: Conv1d's own U(-1/sqrt(k), 1/sqrt(k)), or every stream near the source."""

    def start(taps: Tensor, generator: torch.Generator) -> None:
        for row in reference.tap_rows(kernel_sizes):
            if row is None:
                continue
            if conv_init == "uniform":
                bound = 1 / math.sqrt(row.stop - row.start)
                taps[row].uniform_(-bound, bound, generator=generator)
            else:
                taps[row].normal_(0.0, WEIGHT_STD, generator=generator)
                taps[row.start] += 1.0

    return start


def gate_bias_start(gate: Gate, m: int) -> float:
    """The bias that makes every gate 1/m where the data-dependent part is zero."""
    return 0.0 if gate == "softmax" else math.log(1 / (m - 1))


class MSAR(DepthAttention):
    """Multi-Stream Attention Residuals.

    Source s becomes m full-width streams `u_j[t] = sum_{i<k_j} w_j[i] s[t-i]` (causal, depthwise; stream 1 is s).
    The read at site l is

        e_ij = q_lj . RMSNorm(u_ij)      a_ij = softmax over sources i, per stream j
        r_j  = sum_i a_ij u_ij           h_l  = sum_j g_j r_j
        g    = sigmoid(alpha RMSNorm([r_1; ..; r_m]) W + b)

    Queries start at zero (uniform mean), gates near 1/m. State: see `DepthAttention`; only single-stream sources are
    stored. 44 D + 5 parameters per read for kernel sizes (1, 4, 8, 12).

    Args:
        block_size: S, sublayers per depth block; 1 is the full form, null means 2 ceil(2 n_layers / 16).
        kernel_sizes: causal conv width per stream, in tokens; starts with 1, the source itself. All 1: no convs.
        conv_owner: `producer`: conv group l expands what sublayer l wrote last (0 is the embedding), the same for all
            readers; `reader`: read l expands every source with its own group.
        conv_init: `uniform` (Conv1d's own) or `delta` (tap 0 is 1, plus N(0, 0.02^2) on all taps).
        mix: `adaptive` (the gate above) or `mean` of the streams.
        gate: `sigmoid` or `softmax` over the streams.
        train_queries: false freezes the queries at zero, a uniform mean over depth (control).
        eps: of both norms.
        kernels: auto, triton, reference (plain PyTorch) or compiled (torch.compile of it).
        schedule: of the Triton kernels. `per_block` retrieves from the completed blocks for all reads of a block at
            once, with a fraction of the arithmetic; inside a block the state then holds, for each read to come, what it
            retrieved [B, T, m, D] and its statistics [2, B, T, m], and without recomputation every read keeps its r
            [B, T, m, D] for the backward pass. Needs conv_owner producer and the adaptive mix of two streams or more.
            `per_read` keeps statistics only. With producers' convs either scores a completed source once for all reads
            to come; the state then also holds, for every completed source, these scores [reads to come + 1, B, T, m].
            `auto`: per_block where it can be and blocks have two to sixteen sublayers. The other kernels always read
            one at a time.
    """

    no_decay = frozenset({"query", "mix_scale", "mix_bias"})

    def __init__(
        self,
        block_size: int | None = None,
        kernel_sizes: tuple[int, ...] = (1, 4, 8, 12),
        conv_owner: Literal["producer", "reader"] = "producer",
        conv_init: Literal["uniform", "delta"] = "uniform",
        mix: Literal["adaptive", "mean"] = "adaptive",
        gate: Gate = "sigmoid",
        train_queries: bool = True,
        eps: float = 1e-5,
        kernels: Kernels = "auto",
        schedule: Literal["auto", "per_read", "per_block"] = "auto",
    ) -> None:
        super().__init__(
            block_size,
            eps,
            kernels,
            kernel_sizes=list(kernel_sizes),
            conv_owner=conv_owner,
            conv_init=conv_init,
            mix=mix,
            gate=gate,
            train_queries=train_queries,
            schedule=schedule,
        )
        reference.check_kernel_sizes(kernel_sizes)
        self.kernel_sizes = tuple(kernel_sizes)
        self.m = len(kernel_sizes)
        self.reader_owns_convs = conv_owner == "reader"
        self.conv_init = conv_init
        self.has_mixer = mix == "adaptive" and self.m > 1
        self.gate = gate
        self.train_queries = train_queries
        self.can_share = self.has_mixer and not self.reader_owns_convs
        if schedule == "per_block" and not self.can_share:
            raise ValueError(
                f"schedule=per_block needs conv_owner=producer and mix=adaptive of two streams or more, got "
                f"conv_owner={conv_owner}, mix={mix}, {self.m} streams; use schedule=per_read"
            )
        self.schedule = schedule

    def build(self, d_model: int, n_layers: int) -> None:
        super().build(d_model, n_layers)
        n_reads = self.n_sublayers + 1
        self.declare_list("query", (self.m, d_model), [constant(0.0)] * n_reads)
        self.query.requires_grad_(self.train_queries)
        if K := reference.n_taps(self.kernel_sizes):
            # as many conv groups as reads for either owner: the embedding's and one per sublayer, or one per read
            self.declare_list("taps", (K, d_model), [conv_start(self.conv_init, self.kernel_sizes)] * n_reads)
        if self.has_mixer:
            self.declare_list("mix_weight", (self.m, self.m, d_model), [normal(WEIGHT_STD)] * n_reads)
            self.declare_list("mix_scale", (1,), [constant(GATE_SCALE)] * n_reads)
            self.declare_list("mix_bias", (self.m,), [constant(gate_bias_start(self.gate, self.m))] * n_reads)

    def source_taps(self, site: Site) -> list[Tensor | None]:
        """The conv group [K, D] of each source that the read at `site` sees."""
        if not reference.n_taps(self.kernel_sizes):
            return [None] * self.n_sources(site)
        if self.reader_owns_convs:
            return [self.taps[site.index]] * self.n_sources(site)
        return [self.taps[writer] for writer in self.last_writers(site)]

    def mixer(self, site: Site) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Mix weight [m, m, D], scale [1] and bias [m] of the read at `site`; None for mean mixing."""
        if not self.has_mixer:
            return None, None, None
        return self.mix_weight[site.index], self.mix_scale[site.index], self.mix_bias[site.index]

    def read(self, state: State, site: Site) -> tuple[Tensor, State]:
        position, tensors = split_position(state)
        options = {"kernel_sizes": self.kernel_sizes, "eps": self.eps, "position": position}
        if self._reads_by_block(tensors[0]):
            x, tensors = self._read_by_block(tensors, site, options)
        elif self._scores_ahead(tensors[0]):
            x, tensors = self._read_scored(tensors, site, options)
        else:
            parameters = (self.source_taps(site), self.query[site.index], *self.mixer(site))
            x, tensors = self.run_read("msar_read", tensors, *parameters, gate=self.gate, **options)
        return x, joined(position, tensors)

    def _by_block(self, dtype: torch.dtype) -> bool:
        """Whether fused reads of sources of `dtype` share what they retrieve."""
        if self.schedule == "auto":
            return self.can_share and 2 <= self.block_size <= MAX_READS and dtype != torch.float16
        return self.schedule == "per_block"

    def _reads_by_block(self, source: Tensor) -> bool:
        return self._by_block(source.dtype) and hasattr(self.ops(source), "open_block")

    def kept_by_read(self, site: Site) -> int:
        return self.m * self.d_model if self._by_block(torch.bfloat16) and self.kernels in ("auto", "triton") else 0

    def waiting(self, site: Site) -> int:
        opening = Site(site.index - site.index % self.block_size, site.n_sublayers)
        n_to_come = sum(read > site.index for read in self.reads_of_block(opening))
        return n_to_come * self.kept_by_read(site)

    def _read_by_block(self, tensors: State, site: Site, options: dict) -> tuple[Tensor, State]:
        """The read at `site` of a state `(*completed sources, *their scores, *2 tensors per read to come in the block,
        partial?)`."""
        ops, taps = self.ops(tensors[0]), self.source_taps(site)
        sources, waiting = self._completed(tensors, site)
        partial, partial_taps = None, None
        if self.opens_reads(site):
            older = (waiting, self._score_rows(site, len(waiting)))
            reads = (self._queries_from(site), len(self.reads_of_block(site)))
            waiting, sources, scores = ops.open_block(sources, taps, *older, *reads, **options)
        else:
            scores, waiting = waiting[: len(sources)], waiting[len(sources) :]
            *waiting, partial = waiting
            partial_taps = taps[-1]
        parameters = (partial, partial_taps, self.query[site.index], *self.mixer(site))
        x, partial = ops.read_block(*waiting[:2], *parameters, gate=self.gate, **options)
        return x, (*sources, *scores, *waiting[2:], *(() if partial is None else (partial,)))

    def _scores_ahead(self, source: Tensor) -> bool:
        return not self.reader_owns_convs and hasattr(self.ops(source), "score_source")

    def _read_scored(self, tensors: State, site: Site, options: dict) -> tuple[Tensor, State]:
        """The read at `site` of a state `(*completed sources, *their scores, partial?)`."""
        sources, rest = self._completed(tensors, site)
        if self.opens_reads(site):
            *older, newest = sources
            queries = self._queries_from(site)
            of_newest, newest = self.ops(newest).score_source(newest, self.source_taps(site)[-1], queries, **options)
            sources, scores, partial = (*older, newest), (*rest, of_newest), ()
        else:
            scores, partial = rest[: len(sources)], rest[len(sources) :]
        n, N = len(sources), len(sources) + len(partial)
        parameters = (self.source_taps(site), self.query[site.index], *self.mixer(site))
        x, through = self.ops(tensors[0]).msar_read_through(
            (*sources, *partial), *parameters, gate=self.gate, scores=scores, rows=self._score_rows(site, n), **options
        )
        return x, (*through[:n], *through[N:], *through[n:N])

    def _queries_from(self, site: Site) -> list[Tensor]:
        """Of the read at `site` and all that follow."""
        return [self.query[read] for read in range(site.index, self.n_sublayers + 1)]

    def _score_rows(self, site: Site, n_completed: int) -> list[int]:
        """Where the read at `site` is among the scores of each completed source."""
        return [site.index - n * self.block_size for n in range(n_completed)]

    def opens_reads(self, site: Site) -> bool:
        """Whether reads to come share what is computed at `site`; the head's joins those of the last block."""
        return self.opens_block(site) and not (site.is_head and self.block_size < MAX_READS)

    def reads_of_block(self, site: Site) -> range:
        """The reads that share what is computed at `site`, where `opens_reads`."""
        end = site.index + self.block_size
        if end == self.n_sublayers and self.block_size < MAX_READS:
            end += 1  # the head's
        return range(site.index, min(end, self.n_sublayers + 1))

    def _completed(self, tensors: State, site: Site) -> tuple[State, State]:
        """The sources that were complete when these reads opened, and the rest of the state."""
        n = 1 + site.index // self.block_size
        if not self.opens_block(site):
            return tensors[:n], tensors[n:]
        if not self.opens_reads(site):
            return tensors[: n - 1], tensors[n - 1 :]
        # what was the partial sum is the newest of them
        return (*tensors[: n - 1], tensors[-1]), tensors[n - 1 : -1]

    def sources(self, state: State, site: Site) -> State:
        """The sources that the read at `site` sees."""
        _, tensors = split_position(state)
        completed, rest = self._completed(tensors, site)
        return completed if self.opens_reads(site) else (*completed, rest[-1])

    def inspect(self, state: State, site: Site) -> dict[str, Tensor]:
        position, _ = split_position(state)
        sources, taps = self.sources(state, site), self.source_taps(site)
        streams = [reference.expand(s, w, self.kernel_sizes, position) for s, w in zip(sources, taps, strict=True)]
        logits = [reference.score(stream, self.query[site.index], self.eps) for stream in streams]
        seen = {"weights": torch.softmax(torch.stack(logits, dim=-1), dim=-1)}
        if self.has_mixer:
            retrieved = reference.retrieve(streams, logits)
            seen["gates"] = reference.mix_gates(retrieved, *self.mixer(site), self.gate, self.eps)
        return seen

    def cost(self, site: Site) -> Cost:
        n, m, D, K = self.n_sources(site), self.m, self.d_model, reference.n_taps(self.kernel_sizes)
        # a producer's expansion and norms are needed once per written representation, a reader's at every source
        n_expanded = n if self.reader_owns_convs else 1
        multiply_adds = (K + m) * n_expanded + 2 * m * n  # convs and squares; dots and weighted sums
        multiply_adds += (m + m * m + m) if self.has_mixer else m  # squares, gate logits, gated sum
        multiply_adds += 0 if site.is_head else 1
        parameters = K * D + m * D + (m * m * D + m + 1 if self.has_mixer else 0)
        return Cost(parameters, multiply_adds * D, (n + 1) * D + self.write_elements(site))
