"""The Triton operations under the names of `reference`; those ending in `_through` also pass the sources on."""

from kernels.attnres_read import attnres_read, attnres_read_through
from kernels.hyper import hc_read, mhc_contract, mhc_read, update, update_and_project
from kernels.msar_ahead import score_source
from kernels.msar_block import open_block, read_block
from kernels.msar_read import msar_read, msar_read_through

__all__ = [
    "attnres_read",
    "attnres_read_through",
    "hc_read",
    "mhc_contract",
    "mhc_read",
    "msar_read",
    "msar_read_through",
    "open_block",
    "read_block",
    "score_source",
    "update",
    "update_and_project",
]
