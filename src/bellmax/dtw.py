"""The old place of :mod:`bellmax.structures.dtw`."""

from bellmax.structures.dtw import DTW

__all__ = ["DTW"]
