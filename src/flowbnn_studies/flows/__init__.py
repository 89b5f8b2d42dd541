"""Studies of flows: densities of points, tables and images, target densities, and autoencoders."""
