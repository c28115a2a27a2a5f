"""Parts that both ZeRO engines share."""
