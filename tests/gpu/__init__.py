"""Kernels for GPUs, tested without one: their PTX is executed on the CPU."""
