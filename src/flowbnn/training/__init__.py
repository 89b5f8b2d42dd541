"""Training: one loop over any objective, with checkpoints that survive a kill."""

from flowbnn.training.compatibility import check_weights
from flowbnn.training.device import connect, is_main_process, is_torchrun_worker, num_processes, run_on_main
from flowbnn.training.finite import first_nonfinite_layer
from flowbnn.training.history import History
from flowbnn.training.loop import train
from flowbnn.training.options import Clock, EarlyStop, Epoch, TrainingOptions
from flowbnn.training.progress import ProgressBar, track
from flowbnn.training.schedules import cosine
from flowbnn.training.storage import check_writable, load_tensors, save_tensors

__all__ = [
    "Clock",
    "EarlyStop",
    "Epoch",
    "History",
    "ProgressBar",
    "TrainingOptions",
    "check_weights",
    "check_writable",
    "connect",
    "cosine",
    "first_nonfinite_layer",
    "is_main_process",
    "is_torchrun_worker",
    "load_tensors",
    "num_processes",
    "run_on_main",
    "save_tensors",
    "track",
    "train",
]
