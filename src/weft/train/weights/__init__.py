"""Model files: pretrained folders, adapters, a run's decoder, checkpoints of other trainers."""
