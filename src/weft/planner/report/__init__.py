"""Explanations, comparisons, pictures and configs of plans."""
