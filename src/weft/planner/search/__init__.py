"""Search: from a question to ranked plans."""
