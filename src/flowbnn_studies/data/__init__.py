"""Image data: published files with checksums, transformations, augmentation and corruption."""

from flowbnn_studies.data.augment import CORRUPTIONS, CropAndFlip, Translate, corrupt, mirror, novel_noise
from flowbnn_studies.data.images import ImageSet, Normalize, device_loader
from flowbnn_studies.data.load import data_folder, load_images

__all__ = [
    "CORRUPTIONS",
    "CropAndFlip",
    "ImageSet",
    "Normalize",
    "Translate",
    "corrupt",
    "data_folder",
    "device_loader",
    "load_images",
    "mirror",
    "novel_noise",
]
