"""Which samples a rank gets, in which microbatch."""
