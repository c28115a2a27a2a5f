"""`weft plan`."""
