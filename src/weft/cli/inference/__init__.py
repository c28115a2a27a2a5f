"""Commands that apply trained models: texts, scores, lm-eval, any function."""
