"""Calibration of a trained network on data that its weights have not seen."""

from flowbnn.calibrate.calibrate import calibrate
from flowbnn.posterior.calibration import Calibration

__all__ = ["Calibration", "calibrate"]
