"""Functions of JSON items on warm processes: one machine, Slurm, Dask, or any executor of concurrent.futures."""
