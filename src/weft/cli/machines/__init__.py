"""Commands on this machine: measurements, checks, energy."""
