"""Instructions that the inner loops of the MSAR kernels issue, without a GPU: `python -m kernels.bench_issue`.

Every kernel is compiled for sm_90 at D = 2112 and kernel sizes (1, 4, 8, 12), and the instructions of its loops are
counted in the SASS per source, token and channel (per token and channel for the mix, which forward has no loop and is
counted whole). A lane issues one instruction a clock and scheduler at best, which bounds the time from below: 132 SMs
of 4 schedulers at 1.75 GHz. Kernels of two warps a scheduler have been measured at 50 to 70 % of that, the others at up
to 100 %.
"""

import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import (
    mixing,
    mixing_backward,
    mixing_onto,
    msar_inputs,
    msar_mix,
    msar_steps,
    streams,
    streams_backward,
    walk,
)

D, TOKENS = 2112, 8192
SOURCES = 8
ISSUED_PER_SECOND = 132 * 4 * 1.75e9 * 32  # by all lanes
LOOP_MIN = 40  # instructions: shorter loops are set-up
SHAPE = {"SIZES": (1, 4, 8, 12), "D": D, "PACKED": False, "DTYPE": tl.bfloat16, "BLOCK_D": 64, "p_position": None}
TILE = SHAPE | {"EVEN": True, "WARPS": 4}
NARROW = {"COMPUTE": tl.float16}
WALK = SHAPE | NARROW | {"DR_DTYPE": tl.float16, "UNROLL": 4, "ADD": True, "SHARED": False}
WALK |= {"EVEN": True, "MIXED": False}
ADDED = SHAPE | NARROW | {"FIRST": 0, "UNROLL": 4, "EVEN": True, "STAGES": 3, "OUT_DTYPE": tl.float16}
MIX = {"M": 4, "D": D}
MIX_ROWS = {"TOKENS": msar_mix.MIX_TOKENS, "SOFTMAX": False, "MEAN": False}
MIX_ROWS |= msar_mix.row_tiles(4, D, msar_mix.MIX_TOKENS)
NARROW_MIX = {"SOFTMAX": False} | msar_mix.row_tiles(4, D, values=msar_mix.NARROW_MIX_VALUES)
MIX_FACTORS = {"SOFTMAX": False, "MEANS": True} | msar_mix.factors_tile(4).options()
MIX_GRADIENT = {"WIDTH": msar_mix.product_width(4, 2), "PARTS": 2, "DOT": "half"}
MIX_GRADIENT |= msar_mix.gradient_tile(4, torch.float16).options() | {"EVEN": True}
MIX_GRADIENT_REGISTERS = MIX_GRADIENT.pop("maxnreg")
MIX_WARPS, NARROW_MIX_WARPS, FACTORS_WARPS, GRADIENT_WARPS = (
    tile.pop("num_warps") for tile in (MIX_ROWS, NARROW_MIX, MIX_FACTORS, MIX_GRADIENT)
)
ONTO = {"SIZES": (1, 4, 8, 12), "D": D, "PACKED": False, "SOFTMAX": False, "DTYPE": tl.bfloat16, "p_position": None}
ONTO |= msar_mix.whole_tiles(torch.float16, 4, D)
ONTO_WARPS, ONTO_REGISTERS = ONTO.pop("num_warps"), ONTO.pop("maxnreg")
NO_QUERY = {"QUERY": False, "p_slope": None, "p_query": None}
TYPES = {
    "p_out": "*fp16",
    "p_dh": "*bf16",
    "p_r": "*fp16",
    "p_dr": "*fp16",
    "p_parts": "*bf16",
    "p_c": "*bf16",
    "p_of_r": "*fp16",
    "p_more": "*fp16",
    "p_base": "*fp16",
    "p_table": "*i64",
    "p_out_table": "*i64",
    "p_dr_table": "*i64",
    "eps": "fp32",
}
NARROW_TYPES = TYPES | dict.fromkeys(("p_weights", "p_slope", "p_bend"), "*fp16")  # where fp16 computes
MIX_TYPES = TYPES | dict.fromkeys(("p_weight", "p_weights"), "*fp16") | {"p_h": "*bf16", "p_words": "*i32"}
COUNTS = ("T", "N", "n_plain", "n_table", "P", "n_tiles", "n_segments", "SEGMENT", "count", "tokens")


class Device:
    """A GPU that need not be there, as Triton asks for it: what a kernel is compiled for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


class Case(NamedTuple):
    """A kernel as a launch compiles it, and how many values one turn of its loops makes of a lane (`per_turn`)."""

    name: str
    kernel: object
    constants: dict
    warps: int
    per_turn: float
    sources: int  # that the launch goes through; 1 for the mix
    registers: int | None = None  # at most, as `msar_inputs.Sources.constants` says


NO_MORE = {"MORE": False, "p_more": None, "p_more_unit": None}
WHOLE = {"BEND": True, "QUERY": True} | NO_MORE
WEIGHTS_ONLY = NO_QUERY | NO_MORE | {"BEND": False, "p_bend": None}
NORM_ONLY = NO_QUERY | {"BEND": True, "MORE": True, "p_dr_table": None, "p_weights": None}


def walk_case(name: str, kind: dict, n_reads: int, sources: int = 1) -> Case:
    warps_per_sm, stages = msar_steps.walk_resources(torch.float16, n_reads, kind["BEND"])
    constants = WALK | kind | {"READS": n_reads, "STAGES": stages}
    return Case(name, walk.gradient_kernel, constants, 1, 8, sources, msar_inputs.REGISTERS[warps_per_sm])


CASES = (
    Case("score", streams.score_kernel, TILE | {"STEPS": 4, "QUERY": True}, 4, 8, 1, 168),
    Case(
        "norms",
        streams.score_kernel,
        TILE | {"STEPS": 4, "QUERY": False, "p_query": None, "p_logits": None},
        4,
        8,
        1,
        168,
    ),
    Case(
        "retrieve",
        streams.retrieve_kernel,
        TILE | NARROW | {"STEPS": 8, "SCALED": True, "OUT_DTYPE": tl.float16, "READS": 1},
        4,
        16,
        SOURCES + 1,
        128,
    ),
    Case(
        "retrieve, 4 reads",
        streams.retrieve_kernel,
        TILE | NARROW | {"STEPS": 4, "SCALED": True, "OUT_DTYPE": tl.float16, "READS": 4},
        4,
        8,
        SOURCES,
        128,
    ),
    Case("mix", mixing.mix_kernel, MIX | MIX_ROWS, MIX_WARPS, D / 32 / MIX_WARPS, 1),
    Case("mix in fp16", mixing.narrow_mix_kernel, MIX | NARROW_MIX, NARROW_MIX_WARPS, D / 32 / NARROW_MIX_WARPS, 1),
    Case("mix backward, factors", mixing_backward.factors_kernel, MIX | MIX_FACTORS, FACTORS_WARPS, 8, 1),
    Case(
        "mix backward, gradients",
        mixing_backward.gradient_kernel,
        MIX | MIX_GRADIENT,
        GRADIENT_WARPS,
        16,
        1,
        MIX_GRADIENT_REGISTERS,
    ),
    Case(
        "weights' gradient",
        streams_backward.dweights_kernel,
        TILE | NARROW | {"STEPS": 8, "SHARED": False, "READS": 1, "DR_DTYPE": tl.float16},
        4,
        16,
        SOURCES + 1,
        128,
    ),
    Case(
        "weights' gradient, 4 reads",
        streams_backward.dweights_kernel,
        TILE | NARROW | {"STEPS": 4, "SHARED": False, "READS": 4, "DR_DTYPE": tl.float16},
        4,
        8,
        SOURCES,
        168,
    ),
    Case("partial sum onto what was retrieved", streams.add_source_kernel, ADDED, 1, 8, 1, 128),
    Case(
        "partial sum added and mixed",
        mixing_onto.mix_onto_kernel,
        ONTO,
        ONTO_WARPS,
        mixing_onto.GROUP.value * D / 32 / ONTO_WARPS,
        1,
        ONTO_REGISTERS,
    ),
    walk_case("walk, scored in the read", WHOLE, 1),
    walk_case("walk, norms of a source", NORM_ONLY, 0),
    *(walk_case(f"walk, {n} of a block", WEIGHTS_ONLY, n, SOURCES) for n in (1, 2, 3, 4)),
)


def compiled(case: Case):
    """The kernel as a launch with aligned tensors and T a multiple of 16 compiles it for sm_90."""
    signature, fixed, hints = {}, {}, {}
    for place, name in enumerate(case.kernel.arg_names):
        if name in case.constants:
            signature[name], fixed[(place,)] = "constexpr", case.constants[name]
            continue
        types = NARROW_TYPES if case.constants.get("COMPUTE") == tl.float16 else TYPES
        types = MIX_TYPES if case.kernel in (mixing.narrow_mix_kernel, mixing_onto.mix_onto_kernel) else types
        signature[name] = types.get(name, "i32" if name in COUNTS else "*fp32")
        if name.startswith("p_") or name in ("T", "P"):
            hints[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=fixed, attrs=hints)
    options = {"num_warps": case.warps}
    if case.registers is not None:
        options["maxnreg"] = case.registers
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def instructions(cubin: bytes) -> tuple[list[tuple[int, str]], int]:
    """Address and text of every instruction, and the registers of a thread."""
    cuobjdump = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass, usage = (
            subprocess.run([cuobjdump, option, file.name], capture_output=True, text=True, check=True)
            for option in ("-sass", "-res-usage")
        )
    found = re.findall(r"^\s+/\*([0-9a-f]+)\*/\s+(.*?);", sass.stdout, re.MULTILINE)
    registers = re.search(r"REG:(\d+)", usage.stdout + usage.stderr)
    return [(int(address, 16), text) for address, text in found], int(registers[1])


def operation(line: str) -> str:
    """The operation's name, without its predicate and modifiers."""
    return re.sub(r"^@!?U?P\w+\s+", "", line).split()[0].partition(".")[0]


def in_loops(listing: list[tuple[int, str]]) -> list[str]:
    """Operation names of the instructions between a backward branch and its target."""
    names = []
    for address, text in listing:
        target = re.search(r"BRA\S*\s+.*?(0x[0-9a-f]+)", text)
        if target is None or not int(target[1], 16) < address - 16 * LOOP_MIN:
            continue
        body = [line for at, line in listing if int(target[1], 16) <= at <= address]
        names += map(operation, body)
    return names


def main() -> int:
    triton.runtime.driver.set_active(Device(90))  # kernels ask what they are compiled for
    print(f"{'kernel':<38}{'issued':>8}{'math':>7}{'loads':>7}{'spills':>8}{'registers':>11}{'at least':>12}")
    for case in CASES:
        listing, registers = instructions(compiled(case).asm["cubin"])
        names = in_loops(listing) or [operation(line) for _, line in listing]
        arithmetic = sum(name in ("FFMA", "FMUL", "FADD", "HFMA2", "HMUL2", "HADD2") for name in names)
        spills = sum(name in ("LDL", "STL") for name in names)
        loads = sum(name in ("LDG", "LDGSTS") for name in names)
        issued = len(names) / case.per_turn
        ms = issued * case.sources * TOKENS * D / ISSUED_PER_SECOND * 1e3
        print(
            f"{case.name:<38}{issued:>8.1f}{arithmetic / case.per_turn:>7.1f}{loads / case.per_turn:>7.1f}"
            f"{spills:>8}{registers:>11}{ms:>9.3f} ms",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
