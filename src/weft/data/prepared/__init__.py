"""Training data in its stored form: made once, digested, reused."""
