"""Records, documents and tokenizers."""
