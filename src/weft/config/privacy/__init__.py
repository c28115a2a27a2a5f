"""The section [privacy] and its rules."""
