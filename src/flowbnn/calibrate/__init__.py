"""A trained network and data that it has not seen give a calibrated Bayesian network."""

from flowbnn.calibrate.network import Calibration, calibrate

__all__ = ["Calibration", "calibrate"]
