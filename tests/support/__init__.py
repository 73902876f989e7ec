"""Helpers that several test modules share: oracles, problems, patches and data."""
