"""Training: one loop over any step function, with checkpoints that survive a kill."""

from flowbnn.training.checkpoint import check_architecture, check_finite_weights, load_weights
from flowbnn.training.cuda_graph import capturable
from flowbnn.training.device import connect, unwrap
from flowbnn.training.finite import check_finite_batch, first_nonfinite_layer
from flowbnn.training.history import History
from flowbnn.training.launch import alone, is_main_process, launched, processes
from flowbnn.training.loop import Step, train
from flowbnn.training.options import Clock, EarlyStop, TrainingOptions
from flowbnn.training.progress import track
from flowbnn.training.storage import check_writable, load_tensors, save_tensors

__all__ = [
    "Clock",
    "EarlyStop",
    "History",
    "Step",
    "TrainingOptions",
    "alone",
    "capturable",
    "check_architecture",
    "check_finite_batch",
    "check_finite_weights",
    "check_writable",
    "connect",
    "first_nonfinite_layer",
    "is_main_process",
    "launched",
    "load_tensors",
    "load_weights",
    "processes",
    "save_tensors",
    "track",
    "train",
    "unwrap",
]
