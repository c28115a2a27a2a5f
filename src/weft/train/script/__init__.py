"""`weft.init`: Weft in a custom training script."""
