"""Compiles the depth-attention kernels for sm_90 and prints their names; `many`, `one_token` (all counts 1),
or `even` (those that are compiled anew where their tiles divide the sequence).

Run by test_compilation.py in a process of its own, because Triton decides at import whether it interprets.
"""

import itertools
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from kernels import (
    attnres_read,
    cross_entropy,
    depth_softmax,
    dots,
    mixing,
    mixing_backward,
    mixing_onto,
    mixing_tokens,
    narrow,
    streams,
    streams_backward,
    walk,
)

D = 72
SIZES = (1, 3)
SOURCES = {"SIZES": SIZES, "D": D, "PACKED": True, "DTYPE": tl.bfloat16}
TILE = {"STEPS": 4, "WARPS": 4, "BLOCK_D": 64, "EVEN": False}
WALK = {"READS": 1, "BLOCK_D": 64, "UNROLL": 2, "SHARED": False, "DR_DTYPE": tl.float16, "ADD": True}
WALK |= {"EVEN": False, "STAGES": 3, "MIXED": False}
WHOLE = {"BEND": True, "QUERY": True, "MORE": False}
WEIGHTS_ONLY = {"BEND": False, "QUERY": False, "MORE": False}
NORM_ONLY = {"READS": 0, "BEND": True, "QUERY": False, "MORE": True}
RETRIEVED = SOURCES | TILE | {"READS": 1, "SCALED": True, "OUT_DTYPE": tl.float16}
ADDED = SOURCES | {"FIRST": 0, "BLOCK_D": 64, "UNROLL": 2, "EVEN": False, "STAGES": 3, "OUT_DTYPE": tl.float16}
DWEIGHTS = SOURCES | TILE | {"READS": 1, "SHARED": False, "DR_DTYPE": tl.float16}
ONE_CHANNEL = {"BLOCK_D": 32}  # per lane
TWO_PARTS = {"SIZES": SIZES, "PARTS": 2, "BLOCK": 64}
NARROW = {"COMPUTE": tl.float16}
WIDE = {"COMPUTE": tl.float32, "p_fit": None, "p_dfit": None}
NARROW_POINTERS = ("p_weights", "p_slope", "p_bend")
ATTNRES = {"D": D, "TILE": 64, "STAGES": 4, "DTYPE": tl.bfloat16}
MIX = {"M": 2, "D": D}
MIX_ROWS = {"TILE": 64, "TAIL": 64, "LANES": 64, "TOKENS": 2}
WHOLE_TOKENS = {"D": 1048, "TILE": 1024, "LANES": 128, "HAS_TAIL": True, "SOFTMAX": True}
MIX_GRADIENT = {"EVEN": False, "BLOCK_T": 32, "BLOCK_D": 64, "STAGES": 2}
# the module's kernel, what it is compiled for, and warps
KERNELS = [
    (attnres_read.forward_kernel, ATTNRES, 1),
    (attnres_read.forward_kernel, ATTNRES | {"p_gain": None}, 1),
    (attnres_read.backward_kernel, ATTNRES | {"NP": 4, "ADD": True}, 4),
    (attnres_read.query_gradient_kernel, {"D": D, "BLOCK_R": 256, "BLOCK_D": 16}, 8),
    (streams.score_kernel, SOURCES | TILE | {"QUERY": True}, 4),
    (streams.score_kernel, SOURCES | TILE | {"QUERY": False}, 4),
    (dots.columns_kernel, TWO_PARTS | {"D": D}, 4),
    (dots.logits_kernel, TWO_PARTS | {"PACKED": True}, 4),
    (dots.slopes_kernel, {"M": 2, "BLOCK_T": 128, "BLOCK_M": 2}, 4),
    (dots.units_kernel, {"SIZES": SIZES, "BLOCK": 64}, 4),
    (dots.spread_kernel, TWO_PARTS | {"PACKED": True}, 4),
    (dots.parameters_kernel, TWO_PARTS | {"D": D}, 1),
    (streams.retrieve_kernel, RETRIEVED | NARROW, 4),
    (streams.add_source_kernel, ADDED | NARROW, 1),
    (streams.add_source_kernel, ADDED | WIDE | ONE_CHANNEL, 1),
    (streams.retrieve_kernel, RETRIEVED | NARROW | {"READS": 4}, 4),
    (streams.retrieve_kernel, RETRIEVED | NARROW | ONE_CHANNEL, 4),
    (streams.retrieve_kernel, RETRIEVED | WIDE | {"SCALED": False}, 4),
    (streams.retrieve_kernel, RETRIEVED | WIDE | {"READS": 2}, 4),
    (cross_entropy.cross_entropy_kernel, {"GRADIENT": True, "BLOCK": 1024}, 2),
    (narrow.narrow_taps_kernel, {"BLOCK_K": 4, "BLOCK_D": 64}, 4),
    (narrow.narrow_weights_kernel, {"READS": 2, "BLOCK": 128}, 4),
    (narrow.fit_kernel, {"LEARNED": True, "NORMS": 4, "BLOCK": 64}, 4),
    (narrow.gradient_peaks_kernel, {"READS": 2, "M": 2, "BEND": True, "QUERY": True, "BLOCK": 1024}, 4),
    (narrow.narrow_gradients_kernel, {"READS": 2, "BEND": True, "QUERY": True, "BLOCK": 128}, 4),
    (streams_backward.dweights_kernel, DWEIGHTS | NARROW, 4),
    (streams_backward.dweights_kernel, DWEIGHTS | NARROW | ONE_CHANNEL, 4),
    (streams_backward.dweights_kernel, DWEIGHTS | NARROW | {"READS": 3}, 4),
    (streams_backward.dweights_kernel, DWEIGHTS | WIDE | {"SHARED": True}, 4),
    (walk.gradient_kernel, SOURCES | WALK | NARROW | WHOLE, 1),
    (walk.gradient_kernel, SOURCES | WALK | WIDE | WHOLE, 1),
    (walk.gradient_kernel, SOURCES | WALK | NARROW | WEIGHTS_ONLY | {"READS": 3}, 1),
    (walk.gradient_kernel, SOURCES | WALK | NARROW | WHOLE | ONE_CHANNEL, 1),
    (walk.gradient_kernel, SOURCES | WALK | NARROW | NORM_ONLY, 1),
    (walk.gradient_kernel, SOURCES | WALK | NARROW | NORM_ONLY | {"READS": 2, "MIXED": True}, 1),
    (depth_softmax.weights_kernel, {"BLOCK": 128}, 4),
    (depth_softmax.merge_kernel, {"BLOCK": 128}, 4),
    (depth_softmax.handed_kernel, {"BLOCK": 128}, 4),
    (depth_softmax.slopes_kernel, {"READS": 2, "UNITS": True, "MEANS": True, "BEND": True, "BLOCK": 128}, 4),
    (mixing.mix_kernel, MIX | MIX_ROWS | {"SOFTMAX": False, "MEAN": False}, 2),
    (mixing.narrow_weight_kernel, {"ROWS": 4, "D": D, "BLOCK": 64}, 4),
    (mixing.narrow_mix_kernel, MIX | {"TILE": 64, "TAIL": 64, "LANES": 64, "SOFTMAX": False}, 2),
    (mixing_backward.weight_kernel, {"D": D, "BLOCK": 64, "PARTS": 2}, 4),
    (
        mixing_backward.factors_kernel,
        MIX | {"BLOCK_T": 1, "BLOCK_D": 64, "STAGES": 3, "SOFTMAX": True, "MEANS": True},
        1,
    ),
    (mixing_backward.parts_kernel, {"M": 2, "WIDTH": 4, "PARTS": 2, "BLOCK_T": 32}, 4),
    (mixing_backward.gradient_kernel, MIX | MIX_GRADIENT | {"WIDTH": 4, "PARTS": 2, "DOT": "half"}, 4),
    (mixing_backward.gradient_kernel, MIX | MIX_GRADIENT | {"WIDTH": 16, "PARTS": 1, "DOT": "tf32x3"}, 4),
    (mixing_tokens.narrow_rows_kernel, {"D": D, "BLOCK": 64}, 4),
    (mixing_tokens.backward_kernel, MIX | WHOLE_TOKENS, 4),
    (mixing_onto.mix_onto_kernel, SOURCES | WHOLE_TOKENS, 4),
]
FULL_SIZE = {"SIZES": (1, 4, 8, 12), "D": 2112, "PACKED": False, "UNROLL": 4}
KERNELS += [
    (walk.gradient_kernel, SOURCES | WALK | NARROW | WEIGHTS_ONLY | FULL_SIZE | {"READS": 2}, 1),
    (streams.add_source_kernel, ADDED | NARROW | FULL_SIZE, 1),
]
COUNTS = "T N n_plain n_table P K V n_tiles n_segments n_tokens count tokens n_norms n_reads".split()
TYPES = {
    "p_out": "*bf16",
    "p_dh": "*bf16",
    "p_r": "*fp16",
    "p_dr": "*fp16",
    "p_parts": "*bf16",
    "p_c": "*bf16",
    "p_of_r": "*fp16",
    "p_columns": "*bf16",
    "p_weighted": "*fp16",
    "p_more": "*fp16",
    "p_base": "*fp16",
    "p_table": "*i64",
    "p_target": "*i64",
    "ignored": "i32",
    "p_dr_table": "*i64",
    "p_position": "*i32",
    "p_words": "*i32",
    "p_taps": "*fp16",
    "p_narrow": "*fp16",
    "p_out_table": "*i64",
    "p_narrow_weights": "*fp16",
    "p_narrow_slope": "*fp16",
    "p_narrow_bend": "*fp16",
    "SEGMENT": "i32",
    "apart": "i32",
    "group_step": "i32",
    "M": "i32",
    "D": "i32",
    "eps": "fp32",
    "out_peak": "fp32",
    "constant": "fp32",
}


def check(kernel, constants: dict, warps: int, all_one: bool) -> None:
    types = TYPES
    if kernel in (mixing.narrow_mix_kernel, mixing_tokens.backward_kernel, mixing_onto.mix_onto_kernel):
        types = TYPES | {"p_weight": "*fp16", "p_h": "*bf16"}
    if kernel is mixing_onto.mix_onto_kernel:
        types |= {"p_weights": "*fp16"}
    if constants.get("PARTS") == 1:  # a mix of fp32 streams
        types = TYPES | dict.fromkeys(("p_r", "p_dr", "p_parts", "p_c", "p_of_r"), "*fp32")
    signature, fixed, hints = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        value = constants.get(name, 1 if all_one and name in COUNTS else None)
        if name in NARROW_POINTERS and constants.get("COMPUTE") == tl.float16:
            signature[name] = "*fp16"
        elif name in constants:
            signature[name], fixed[(place,)] = "constexpr", value
        elif value is None:
            signature[name] = types.get(name, "i32" if name in COUNTS else "*fp32")
        else:
            signature[name], fixed[(place,)] = "constexpr", value
        if signature[name][0] == "*" and constants.get("D") == FULL_SIZE["D"]:
            hints[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=hints)
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    if kernel is streams_backward.dweights_kernel and (constants["COMPUTE"], constants["BLOCK_D"]) == (tl.float16, 64):
        check_layout_of_sums(compiled.asm["ttgir"], warps)
    if constants.get("UNROLL") == FULL_SIZE["UNROLL"] and constants["EVEN"]:
        check_stages(compiled.asm["ttgir"])
    print(kernel.__name__)


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


if __name__ == "__main__":
    for kernel, constants, warps in KERNELS:
        if sys.argv[1] != "even":
            check(kernel, constants, warps, all_one=sys.argv[1] == "one_token")
        elif "EVEN" in constants:
            check(kernel, constants | {"EVEN": True}, warps, all_one=False)
