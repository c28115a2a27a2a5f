"""Commands that plan: plans of training and generation, their pages, compiled steps."""
