"""Energy of devices: meters, power limits, and their tuning. Nothing here imports torch."""
