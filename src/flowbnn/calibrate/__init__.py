"""A trained network and data that it has not seen give a calibrated Bayesian network."""

from flowbnn.calibrate.network import calibrate
from flowbnn.posterior.calibration import Calibration

__all__ = ["Calibration", "calibrate"]
