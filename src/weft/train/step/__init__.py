"""One optimizer step, its microbatches and its diagnosis."""
