"""The kernels for GPUs on the GPU at hand: are they right, and how long do they take?"""
