"""Dropout where ranks have parts: the same numbers where they compute the same, others where they compute parts.

Every rank of a line starts a microbatch from the same seed. Where all compute the same they draw the same. Inside a cut
part, where each has its own heads or features, each draws from a stream of its own (`Fork`), and afterwards all go on
from where they were. Where each has a part of the tokens, it draws for all of them and keeps its part, so that the mask
is the one that a rank alone would have drawn (`TokenDropout`).

B sequences, T tokens, S tokens of this rank, D features.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from weft.parallel.cut_linear import TOKENS, Line

#: What attention modules call the share that they drop of their own scores.
RATES = ("attention_dropout", "attn_dropout", "dropout", "attn_pdrop", "attention_probs_dropout_prob", "p")


class Fork:
    """A stream of random numbers of this rank's own, while it works on its part. path: another stream at each place."""

    def __init__(self, line: Line, module: nn.Module | None, path: str = ""):
        self._line = line
        self._path = path
        self._module = module if module is not None and _drops(module) else None
        self._device: torch.device | None = None
        self._before: list[torch.Tensor] = []
        self._start: list[torch.Tensor] = []

    @property
    def is_open(self) -> bool:
        """Whether this rank is inside the part."""
        return bool(self._before)

    def begin(self) -> None:
        """From here this rank draws other numbers than the rest of the line."""
        self.end()
        if self._module is None or not self._module.training:
            return
        device = next(self._module.parameters()).device
        self._device = device if device.type == "cuda" else None
        self._before = self._states()
        text = self._before[-1].numpy().tobytes() + f"{self._path}/{self._line.axis.rank}".encode()
        torch.manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little"))
        self._start = self._states()

    def end(self) -> None:
        """All go on with the numbers that they share: the next ones where some were drawn here, else the same."""
        if not self._before:
            return
        drew = any(not torch.equal(now, start) for now, start in zip(self._states(), self._start, strict=True))
        before, self._before, self._start = self._before, [], []
        torch.set_rng_state(before[0])
        if self._device is not None:
            torch.cuda.set_rng_state(before[1], self._device)
        if drew:
            torch.rand((), device=self._device or "cpu")

    def _states(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        return states if self._device is None else [*states, torch.cuda.get_rng_state(self._device)]


def _drops(module: nn.Module) -> bool:
    """Whether the module, or one in it, drops anything."""
    for part in module.modules():
        for name in RATES:
            value = getattr(part, name, None)
            if isinstance(value, float) and value > 0:
                return True
    return False


class TokenDropout(nn.Module):
    """Dropout of a part of the tokens, with the mask that all tokens together would have."""

    _weft_line: Line
    _weft_forks: list[Fork]

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Same shape."""
        rate: Any = self.p
        inside = any(fork.is_open for fork in self._weft_forks)
        if not self.training or rate == 0 or inside:
            return super().forward(x_BSD)
        axis = self._weft_line.axis
        shape = list(x_BSD.shape)
        shape[TOKENS] *= axis.size
        # Drawn as torch draws it, so that the numbers are those of one rank with all tokens.
        noise_BTD = torch.empty(shape, dtype=x_BSD.dtype, device=x_BSD.device).bernoulli_(1 - rate)
        return x_BSD * noise_BTD.narrow(TOKENS, axis.rank * x_BSD.shape[TOKENS], x_BSD.shape[TOKENS]).div_(1 - rate)
