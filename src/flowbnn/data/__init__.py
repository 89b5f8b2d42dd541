"""Data sets, made from a seed or read from published files, and loaders for what lies in memory."""

from flowbnn.data.augment import CropAndFlip, mirrored, moved
from flowbnn.data.clusters import best_possible, clusters, ring, true_probability
from flowbnn.data.corruptions import CORRUPTIONS, corrupt, novel_noise
from flowbnn.data.curve import curve_points, true_curve
from flowbnn.data.digits import Digits, load_digits
from flowbnn.data.images import ImageSet
from flowbnn.data.load import data_folder, load_images
from flowbnn.data.loader import TensorLoader, device_loader
from flowbnn.data.normalize import Normalize

__all__ = [
    "CORRUPTIONS",
    "CropAndFlip",
    "Digits",
    "ImageSet",
    "Normalize",
    "TensorLoader",
    "best_possible",
    "clusters",
    "corrupt",
    "curve_points",
    "data_folder",
    "device_loader",
    "load_digits",
    "load_images",
    "mirrored",
    "moved",
    "novel_noise",
    "ring",
    "true_curve",
    "true_probability",
]
