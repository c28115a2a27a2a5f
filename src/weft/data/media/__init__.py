"""Images, audio, and both with text."""
