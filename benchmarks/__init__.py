"""Benchmarks. A regular package, because opacus installs a package of the same name, which would be imported instead."""
