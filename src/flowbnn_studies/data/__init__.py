"""Image data: published files, checked, and what is done to them."""

from flowbnn_studies.data.augment import CORRUPTIONS, CropAndFlip, Moved, corrupt, mirrored, novel_noise
from flowbnn_studies.data.images import ImageSet, Normalize, device_loader
from flowbnn_studies.data.load import data_folder, load_images

__all__ = [
    "CORRUPTIONS",
    "CropAndFlip",
    "ImageSet",
    "Moved",
    "Normalize",
    "corrupt",
    "data_folder",
    "device_loader",
    "load_images",
    "mirrored",
    "novel_noise",
]
