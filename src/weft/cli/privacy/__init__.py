"""`weft privacy`: noise for a budget, and the account and audit of a private run."""
