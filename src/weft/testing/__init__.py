"""What tests of distributed code need: ranks on this machine, plans to try, and one process to compare with.

Names are loaded at first use: listing plans needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Case",
    "DecoderCase",
    "ParityResult",
    "RankPool",
    "Sweep",
    "Verdict",
    "Verifier",
    "check_subject",
    "covering",
    "covering_plans",
    "find_subject",
    "legal",
    "train_case",
    "train_cases",
    "train_decoder",
    "train_plain",
]

if TYPE_CHECKING:
    from weft.testing.matrix import covering, legal
    from weft.testing.parity import Case, DecoderCase, ParityResult, train_case, train_cases, train_decoder, train_plain
    from weft.testing.spawn import RankPool
    from weft.testing.subject import find_subject
    from weft.testing.sweep import Sweep, covering_plans
    from weft.testing.verify import Verdict, Verifier, check_subject

__getattr__ = loads(
    __name__,
    {
        "Case": ".parity",
        "DecoderCase": ".parity",
        "ParityResult": ".parity",
        "RankPool": ".spawn",
        "Sweep": ".sweep",
        "Verdict": ".verify",
        "Verifier": ".verify",
        "check_subject": ".verify",
        "covering": ".matrix",
        "covering_plans": ".sweep",
        "find_subject": ".subject",
        "legal": ".matrix",
        "train_case": ".parity",
        "train_cases": ".parity",
        "train_decoder": ".parity",
        "train_plain": ".parity",
    },
)
