"""Events, metrics, alerts, sinks and displays of a run."""
