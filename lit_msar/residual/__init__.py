"""Residual strategies; the class path in a config is the registry."""

from lit_msar.residual.attnres import AttnRes
from lit_msar.residual.attnres_mhc import AttnResMHC
from lit_msar.residual.base import Cost, Residual, Site, State, sites
from lit_msar.residual.hc import HC
from lit_msar.residual.mhc import MHC
from lit_msar.residual.msar import MSAR
from lit_msar.residual.vanilla import Vanilla
from lit_msar.residual.vanilla_conv import VanillaConv
from lit_msar.residual.write_back import WriteBack

__all__ = [
    "HC",
    "MHC",
    "MSAR",
    "AttnRes",
    "AttnResMHC",
    "Cost",
    "Residual",
    "Site",
    "State",
    "Vanilla",
    "VanillaConv",
    "WriteBack",
    "sites",
]
