"""The tables of names that bellmax does not have, for tests."""

from bellmax.names import FOREIGN, PUBLIC, RENAMED

__all__ = ["FOREIGN", "PUBLIC", "RENAMED"]
