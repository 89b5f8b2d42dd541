"""Comparison of a fit with the given network on data that it was not fitted to."""
