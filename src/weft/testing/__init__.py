"""What tests of distributed code need: ranks on this machine, and one process to compare with."""

from weft.testing.parity import DecoderCase, ParityResult, train_decoder
from weft.testing.spawn import RankPool

__all__ = ["DecoderCase", "ParityResult", "RankPool", "train_decoder"]
