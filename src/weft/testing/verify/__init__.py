"""Does a plan train what one process trains? The user's own model, every number compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Settings",
    "Subject",
    "Sweep",
    "Verdict",
    "Verifier",
    "check_subject",
    "covering_plans",
    "find_subject",
]

if TYPE_CHECKING:
    from weft.testing.verify.subject import Settings, Subject, find_subject
    from weft.testing.verify.sweep import Sweep, covering_plans
    from weft.testing.verify.verifier import Verdict, Verifier, check_subject

__getattr__ = loads(
    __name__,
    {
        "Settings": ".subject",
        "Subject": ".subject",
        "Sweep": ".sweep",
        "Verdict": ".verifier",
        "Verifier": ".verifier",
        "check_subject": ".verifier",
        "covering_plans": ".sweep",
        "find_subject": ".subject",
    },
)
