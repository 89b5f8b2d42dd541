"""Laplace approximations: diagonal, Kronecker-factored and full."""
