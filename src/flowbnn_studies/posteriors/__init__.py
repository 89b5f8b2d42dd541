"""How good a posterior of the noise is, and what a better one is worth; one file a study."""
