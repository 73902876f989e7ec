"""Names of :mod:`bellmax.structures.dtw`, for code that imports them from here."""

from bellmax.structures.dtw import DTW

__all__ = ["DTW"]
