"""Trained models under a plan without training: opening them, scoring texts, and answering over HTTP."""
