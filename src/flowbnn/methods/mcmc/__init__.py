"""Markov chain Monte Carlo over weights or noise: HMC, NUTS and random-walk Metropolis."""
