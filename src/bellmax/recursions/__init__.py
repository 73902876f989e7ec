"""Dynamic programs written as plain Python functions: bellmax.program, bellmax.max and bellmax.min."""
