"""Calibration of a trained network on data that its weights have not seen."""

from flowbnn.calibrate.calibrate import CANDIDATES, calibrate
from flowbnn.calibrate.cross_fit import cross_calibrate
from flowbnn.posterior.report import Calibration

__all__ = ["CANDIDATES", "Calibration", "calibrate", "cross_calibrate"]
