"""The device mesh, and every collective, by axis and counted."""
