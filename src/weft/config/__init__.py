"""Plans, run configs, clusters, model shapes and the rules between them; no torch."""
