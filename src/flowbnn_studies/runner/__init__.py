"""Runs any study: the base class, its jobs, the worker processes, and the results that they produce."""
