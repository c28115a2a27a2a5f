"""Search: from a query to ranked plans."""
