"""Which sample comes when: a pure function of seed, epoch and index."""
