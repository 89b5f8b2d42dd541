"""Variational posteriors over weights."""
