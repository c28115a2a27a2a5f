"""Rules for plans and configs: each constraint is one object."""
