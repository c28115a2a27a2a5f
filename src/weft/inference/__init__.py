"""Opening models for generation and scoring."""
