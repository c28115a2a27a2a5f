"""Order of samples, computed from indices."""
