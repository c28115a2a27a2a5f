"""Benchmarks. A regular package: opacus installs one with the same name, which would hide a namespace package."""
