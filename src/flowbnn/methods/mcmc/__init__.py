"""Markov chain Monte Carlo over weights or noise: HMC and NUTS."""
