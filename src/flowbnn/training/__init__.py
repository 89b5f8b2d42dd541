"""Training: one loop over any step function, with checkpoints that survive a kill."""

from flowbnn.training.engine import unwrap
from flowbnn.training.guard import check_finite_batch, first_nonfinite_layer
from flowbnn.training.history import History
from flowbnn.training.loop import Step, train
from flowbnn.training.options import Clock, EarlyStop, TrainingOptions
from flowbnn.training.progress import track
from flowbnn.training.storage import check_writable, load_tensors, save_tensors
from flowbnn.training.weights import check_architecture, check_finite_weights, load_weights

__all__ = [
    "Clock",
    "EarlyStop",
    "History",
    "Step",
    "TrainingOptions",
    "check_architecture",
    "check_finite_batch",
    "check_finite_weights",
    "check_writable",
    "first_nonfinite_layer",
    "load_tensors",
    "load_weights",
    "save_tensors",
    "track",
    "train",
    "unwrap",
]
