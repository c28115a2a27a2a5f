"""Commands on checkpoints."""
