"""Training: one loop over any objective, with checkpoints that survive a kill."""

from flowbnn.training.checkpoint import check_weights
from flowbnn.training.device import alone, connect, is_main_process, launched, processes
from flowbnn.training.finite import first_nonfinite_layer
from flowbnn.training.loop import train
from flowbnn.training.options import Clock, EarlyStop, TrainingOptions, cosine
from flowbnn.training.progress import History, track
from flowbnn.training.storage import check_writable, load_tensors, save_tensors

__all__ = [
    "Clock",
    "EarlyStop",
    "History",
    "TrainingOptions",
    "alone",
    "check_weights",
    "check_writable",
    "connect",
    "cosine",
    "first_nonfinite_layer",
    "is_main_process",
    "launched",
    "load_tensors",
    "processes",
    "save_tensors",
    "track",
    "train",
]
