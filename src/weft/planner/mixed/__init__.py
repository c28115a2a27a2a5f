"""Clusters of unequal devices: plan, shares, split and placement searched together."""
