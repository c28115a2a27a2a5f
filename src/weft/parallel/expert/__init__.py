"""Experts spread over ep, and the balance of their load."""
