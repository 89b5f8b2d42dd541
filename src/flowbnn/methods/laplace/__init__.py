"""Laplace approximations of the posterior over weights: diagonal, Kronecker-factored and full."""
