"""The decoder: torch only, with no strategy's name in it."""

from lit_msar.model.config import DecoderConfig
from lit_msar.model.decoder import Decoder

__all__ = ["Decoder", "DecoderConfig"]
