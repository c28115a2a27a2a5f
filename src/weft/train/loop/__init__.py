"""The training loop: steps, callbacks, checkpoints, reports."""
