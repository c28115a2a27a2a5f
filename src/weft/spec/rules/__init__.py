"""Every constraint is one object: name, predicate, reason, fix."""
