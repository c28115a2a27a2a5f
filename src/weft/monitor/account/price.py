"""What a device costs by time, as people write it: 2.5usd/h."""

from __future__ import annotations

import re
from dataclasses import dataclass

from weft.errors import ConfigError

_PRICE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]{3}|[$€£¥])\s*/\s*(s|min|h|d)")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SIGNS = {"$": "USD", "€": "EUR", "£": "GBP", "¥": "JPY"}


@dataclass(frozen=True, slots=True)
class Price:
    """Money for one device and one second. currency: three letters, in capitals."""

    per_s: float
    currency: str

    @classmethod
    def parse(cls, text: str) -> Price:
        """Read such as "2.5usd/h" or "$30/d".

        Raises:
            ConfigError: where it is no price.
        """
        swapped = re.sub(r"^\s*([$€£¥])\s*([\d.]+)", r"\2\1", text)
        match = _PRICE.fullmatch(swapped.strip())
        if match is None:
            raise ConfigError(
                f"price={text}: a price is a number, a currency and a time, for one device. Use such as 2.5usd/h."
            )
        return cls(float(match[1]) / _SECONDS[match[3]], _SIGNS.get(match[2], match[2].upper()))

    def of(self, device_s: float) -> float:
        """Return what so many seconds of one device cost."""
        return self.per_s * device_s

    def text(self, device_s: float) -> str:
        """Return that in words: "12.50 USD"."""
        return f"{self.of(device_s):,.2f} {self.currency}"
