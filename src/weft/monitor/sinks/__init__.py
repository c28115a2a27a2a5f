"""Where metrics go besides events.jsonl."""
