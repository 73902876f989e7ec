"""The old place of :mod:`bellmax.structures.dag`."""

from bellmax.structures.dag import DAG, DAGPaths

__all__ = ["DAG", "DAGPaths"]
