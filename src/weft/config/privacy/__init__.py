"""The section [privacy]."""
