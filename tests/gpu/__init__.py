"""The acceptance suite of a GPU: what must hold on a device before Weft may claim that it runs there."""
