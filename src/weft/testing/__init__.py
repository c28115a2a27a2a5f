"""What tests of distributed code need: ranks on this machine, and one process to compare with."""

from weft.testing.parity import Case, DecoderCase, ParityResult, train_case, train_decoder
from weft.testing.spawn import RankPool

__all__ = ["Case", "DecoderCase", "ParityResult", "RankPool", "train_case", "train_decoder"]
