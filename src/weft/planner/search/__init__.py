"""From a question to ranked plans."""
