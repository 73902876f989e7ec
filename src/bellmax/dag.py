"""Names of :mod:`bellmax.structures.dag`, for code that imports them from here."""

from bellmax.structures.dag import DAG, DAGPaths

__all__ = ["DAG", "DAGPaths"]
