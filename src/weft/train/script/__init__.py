"""`weft.init`: Weft in a training script of your own."""
