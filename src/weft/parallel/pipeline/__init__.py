"""Pipeline stages and the runtime of a schedule."""
