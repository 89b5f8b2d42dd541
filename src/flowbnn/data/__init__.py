"""Data: loaders of tensors in memory, names of the columns of batches, toy data, and the digits of scikit-learn.

Every function of the library takes data in any of these formats (:func:`~flowbnn.data.formats.as_loader`):

* a loader or a ``Dataset``,
* a pair of tensors or arrays (numpy, pandas), or a dictionary of tensors with ``labels``,
* graphs of torch_geometric, or a data module of Lightning.
"""

from flowbnn.data.formats import Columns
from flowbnn.data.tensor_loader import Augment, TensorLoader
from flowbnn.data.toy import (
    CENTRES,
    CLASSES,
    SPAN,
    Digits,
    Optimum,
    best_possible,
    clusters,
    curve_points,
    load_digits,
    ring,
    true_curve,
    true_probability,
)

__all__ = [
    "CENTRES",
    "CLASSES",
    "SPAN",
    "Augment",
    "Columns",
    "Digits",
    "Optimum",
    "TensorLoader",
    "best_possible",
    "clusters",
    "curve_points",
    "load_digits",
    "ring",
    "true_curve",
    "true_probability",
]
