"""Helpers shared by the five scripts: everything that is not the mathematics of an algorithm."""
