"""Developer tools of this repository. They are tested and not in the wheel."""
