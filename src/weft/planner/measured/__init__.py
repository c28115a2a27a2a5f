"""A machine that was measured: its profile, laws of its primitives, estimates for a host, what runs teach."""
