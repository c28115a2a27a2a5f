"""The verb `weft federate`."""
