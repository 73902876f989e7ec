"""The tables of names that bellmax does not have, for tests."""

from bellmax.names import FOREIGN, RENAMED

__all__ = ["FOREIGN", "RENAMED"]
