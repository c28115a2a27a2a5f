"""Rules of plans and configs: each constraint is one object."""
