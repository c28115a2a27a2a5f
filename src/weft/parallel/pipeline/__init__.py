"""Pipeline parallelism: stages of any model that is a chain of blocks, under any schedule."""
