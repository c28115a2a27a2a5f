"""Terms of a step's time and memory, each from specs alone."""
