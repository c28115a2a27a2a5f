"""Which sample comes when, as arithmetic."""
