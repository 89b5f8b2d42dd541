"""A trained network and data that it has not seen give a calibrated Bayesian network."""

from flowbnn.calibrate.comparison import Calibration
from flowbnn.calibrate.network import calibrate

__all__ = ["Calibration", "calibrate"]
