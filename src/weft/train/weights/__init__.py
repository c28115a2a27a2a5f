"""Files of models: pretrained folders, adapters, a run's decoder, checkpoints of other programs."""
