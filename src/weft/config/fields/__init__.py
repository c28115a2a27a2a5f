"""Values of the fields of a plan: their checks, texts and formats."""
