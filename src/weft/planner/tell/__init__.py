"""What the planner says: why, why not, compare, what if, pictures."""
