"""Constants of the cost model for a measured machine."""
