"""Compiles the kernels for a GPU that need not be there, and prints which: `compile_kernels.py CAPABILITY CASE ...`.

The strategies run, forward and backward, on tensors without memory; each launch is compiled as it would be on a GPU of
that compute capability (80, 89, 90, ...) and then left out. What is compiled is held to the GPU's shared memory, and to
what the kernels take for granted of the compiler.

Run by test_compilation.py in a process of its own, because Triton decides at import whether it interprets.
"""

import contextlib
import itertools
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

import kernels
from kernels import cross_entropy, fused, hyper_launch, streams_backward, walk
from kernels.bench_issue import Device
from kernels.streams import add_source_kernel
from lit_msar.residual import HC, MHC, MSAR, AttnRes, Residual, sites

SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
"""Bytes of shared memory that a program may have, by compute capability (CUDA C++ Programming Guide, table 30)."""
N_LAYERS = 2
NARROW, WIDE = torch.bfloat16, torch.float32
D, T = 72, 256  # tiles divide the sequence, and not the channels


def msar(**options) -> MSAR:
    return MSAR(2, kernels="triton", **{"kernel_sizes": (1, 3)} | options)


# strategy, D, T, dtype, whether documents are packed
CASES = {
    "attnres": [
        (AttnRes(2, kernels="triton"), 2112, T, NARROW, False),
        (AttnRes(1, key_gain=False, kernels="triton"), D, 1, WIDE, False),
    ],
    "lanes": [
        (MHC(kernels="triton"), D, T, NARROW, False),
        (HC(kernels="triton"), D, T, NARROW, False),
    ],
    "other lanes": [
        (MHC(kernels="triton"), D, 1, WIDE, False),
        (HC(kernels="triton", dynamic=False), D, T, torch.float16, False),
    ],
    "msar": [
        (msar(schedule="per_read", gate="softmax"), D, 13, NARROW, True),
        (msar(conv_owner="reader", mix="mean", kernel_sizes=(1, 2, 3, 4, 5)), D, T, NARROW, True),
        (msar(), D, 1, WIDE, False),
    ],
    "msar by whole tokens": [(msar(), 1048, T, NARROW, False)],
}


def compile_instead_of_launching(capability: int) -> None:
    """From here on tensors of the meta device are taken by the kernels, and nothing runs."""
    triton.runtime.driver.set_active(Device(capability))
    torch.Tensor.is_cuda = property(lambda tensor: True)
    torch.autocast = lambda *args, **options: contextlib.nullcontext()  # the meta device has none
    kernels.implementation = lambda *args, **options: fused
    hyper_launch.shared_bytes = lambda device: SHARED[capability]
    run, seen = JITFunction.run, set()

    def compiled(self: JITFunction, *args, grid, warmup: bool, **options):
        binary = run(self, *args, grid=grid, warmup=True, **options)
        if id(binary) not in seen:
            seen.add(id(binary))
            check(self, binary, options, SHARED[capability])
            print(f"{self.__module__}.{self.__name__}", flush=True)
        return binary

    JITFunction.run = compiled


def check(kernel: JITFunction, binary, options: dict, shared: int) -> None:
    assert binary.metadata.shared <= shared, f"{kernel.__name__} takes {binary.metadata.shared} bytes of {shared}"
    narrow = options.get("COMPUTE") == tl.float16
    if kernel is streams_backward.dweights_kernel and narrow and options["BLOCK_D"] == 64:
        check_layout_of_sums(binary.asm["ttgir"], options["WARPS"])
    if kernel in (walk.gradient_kernel, add_source_kernel) and options["EVEN"] and not options["PACKED"]:
        check_stages(binary.asm["ttgir"])


def check_stages(ttgir: str) -> None:
    """What `staged` is for: a turn's loads go through shared memory, and from there straight to where they are used."""
    lines = iter(ttgir.splitlines())
    begin = next(line for line in lines if "scf.for" in line)
    end = " " * (len(begin) - len(begin.lstrip())) + "}"
    loop = "\n".join(itertools.takewhile(lambda line: not line.startswith(end), lines))
    assert "async_copy_global_to_local" in loop
    assert "tt.load" not in loop
    assert "convert_layout" not in loop


def check_layout_of_sums(ttgir: str, warps: int) -> None:
    """What `tensor_sums` takes for granted: in every tile that an `mma` gets a lane has two channels, in order."""
    assert "mma.sync" in ttgir
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.(blocked<\{.*\}>)$", ttgir, re.MULTILINE))
    wanted = f"sizePerThread = [1, 2], threadsPerWarp = [1, 32], warpsPerCTA = [{warps}, 1], order = [1, 0]"
    for line in ttgir.splitlines():
        if "mma.sync" in line:
            for layout in re.findall(r"tensor<\w+, (#\w+)>", line):
                assert layouts[layout] == f"blocked<{{{wanted}}}>", layouts[layout]


def differentiate(strategy: Residual, D: int, T: int, dtype: torch.dtype, packed: bool) -> None:
    """Forward and backward through a model whose sublayers double what they read."""
    with torch.device("meta"):
        strategy.build(D, N_LAYERS)
        x = torch.empty(1, T, D, dtype=dtype, requires_grad=True)
        state = strategy.begin(x, torch.empty(1, T, dtype=torch.int32) if packed else None)
    *inner, _ = sites(N_LAYERS)
    for site in inner:
        x, state = strategy.read(state, site)
        state = strategy.write(state, site, 2 * x)
    strategy.finish(state).sum().backward()


if __name__ == "__main__":
    compile_instead_of_launching(int(sys.argv[1]))
    for name in sys.argv[2:]:
        for case in CASES[name]:
            differentiate(*case)
    if "attnres" in sys.argv:  # no strategy's
        logits, targets = torch.empty(8, 1000, dtype=NARROW, device="meta"), torch.empty(8, device="meta").long()
        cross_entropy.cross_entropy_(logits, targets, -100, wants_gradient=True)
