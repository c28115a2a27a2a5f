"""Dropout where ranks have parts: the same numbers where they compute the same, others where they compute parts.

Every rank of a line starts a microbatch from the same seed. Where all compute the same they draw the same. Inside a cut
part, where each has its own heads or features, each draws from a stream of its own (`Fork`), and afterwards all go on
from where they were. Where each has a part of the tokens, it draws for all of them and keeps its part, so that the mask
is the one that a rank alone would have drawn (`TokenDropout`).

B sequences, T tokens, S tokens of this rank, D features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from weft.parallel.cut_linear import TOKENS, Line

#: What attention modules call the share that they drop of their own scores.
RATES = ("attention_dropout", "attn_dropout", "dropout", "attn_pdrop", "attention_probs_dropout_prob", "p")


class Fork:
    """A stream of random numbers of this rank's own, while it works on its part."""

    def __init__(self, line: Line, module: nn.Module | None):
        self._line = line
        self._module = module if module is not None and _drops(module) else None
        self._before: list[tuple[torch.device | None, torch.Tensor]] = []

    def begin(self) -> None:
        """From here this rank draws other numbers than the rest of the line."""
        self.end()
        if self._module is None or not self._module.training:
            return
        seed = int(torch.randint(2**62, ()))  # equal on all ranks, and another one at each place
        self._before = [(None, torch.get_rng_state())]
        device = next(self._module.parameters()).device
        if device.type == "cuda":
            self._before.append((device, torch.cuda.get_rng_state(device)))
        torch.manual_seed((seed + 0x9E3779B97F4A7C15 * (self._line.axis.rank + 1)) % 2**63)

    def end(self) -> None:
        """All go on with the numbers that they share."""
        for device, state in self._before:
            if device is None:
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, device)
        self._before = []


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
        inside = any(fork._before for fork in self._weft_forks)
        if not self.training or rate == 0 or inside:
            return super().forward(x_BSD)
        axis = self._weft_line.axis
        shape = list(x_BSD.shape)
        shape[TOKENS] *= axis.size
        # Drawn as torch draws it, so that the numbers are those of one rank with all tokens.
        noise_BTD = torch.empty(shape, dtype=x_BSD.dtype, device=x_BSD.device).bernoulli_(1 - rate)
        return x_BSD * noise_BTD.narrow(TOKENS, axis.rank * x_BSD.shape[TOKENS], x_BSD.shape[TOKENS]).div_(1 - rate)
