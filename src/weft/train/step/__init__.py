"""One optimizer step, its microbatches, and the diagnosis of failures."""
