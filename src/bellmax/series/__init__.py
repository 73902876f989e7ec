"""Time series: the warped distance of two, of all pairs, the nearest neighbors and the barycenter of a collection."""

from bellmax.series.barycenter import dtw_barycenter
from bellmax.series.collections import dtw_cdist
from bellmax.series.costs import pairwise
from bellmax.series.neighbors import dtw_neighbors
from bellmax.series.pairs import dtw

__all__ = ["dtw", "dtw_barycenter", "dtw_cdist", "dtw_neighbors", "pairwise"]
