"""Residual strategies; the class path in a config is the registry."""

from lit_msar.residual.attnres import AttnRes
from lit_msar.residual.base import Cost, Residual, Site, State, sites
from lit_msar.residual.msar import MSAR
from lit_msar.residual.vanilla import Vanilla

__all__ = ["MSAR", "AttnRes", "Cost", "Residual", "Site", "State", "Vanilla", "sites"]
