"""Methods with Gaussian posteriors of weights: IVON for all weights, VBLL for the last layer."""
