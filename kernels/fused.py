"""The Triton operations under the names of `reference`; those ending in `_through` also pass the sources on."""

from kernels.attnres_read import attnres_read, attnres_read_through
from kernels.msar_read import msar_read, msar_read_through

__all__ = ["attnres_read", "attnres_read_through", "msar_read", "msar_read_through"]
