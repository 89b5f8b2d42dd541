"""What flows are for: densities of points, tables and images, targets, autoencoders; one file a study."""
