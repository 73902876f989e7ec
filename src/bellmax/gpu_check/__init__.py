"""Verification and benchmarks of the GPU kernels, for ``bellmax gpu``."""
