"""One module for each structure: its scores, its integers, its forms of paths and targets."""
