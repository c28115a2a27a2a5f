"""ZeRO: what its stages share; `flat` holds 0 to 2, `sharded` holds 3."""
