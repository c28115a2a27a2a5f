"""Cost model constants of a machine that was measured."""
