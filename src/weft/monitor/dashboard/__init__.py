"""The page of `weft watch`."""
