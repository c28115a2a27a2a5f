"""The device mesh, and its collectives by axis, with accounting."""
