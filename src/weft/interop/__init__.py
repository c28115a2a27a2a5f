"""Import of configs of other training frameworks."""
