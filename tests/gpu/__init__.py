"""The acceptance suite of a GPU: the checks that a device must pass before Weft supports it."""
