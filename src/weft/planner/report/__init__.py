"""Explanations, comparisons, charts and configs of plans."""
