"""Ensembles of the modes of the noise."""
