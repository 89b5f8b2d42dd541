"""Studies of posteriors of the noise of trained networks."""
