"""States of models and optimizers: full copies, averages, names, reading and writing."""
