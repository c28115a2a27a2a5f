"""Config files, overrides and where each setting came from."""
