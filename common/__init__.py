"""Helpers shared by the four scripts: everything that is not the mathematics of an algorithm."""
