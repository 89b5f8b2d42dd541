"""Tiny random models of transformers, and data for them."""

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


class Rows(Dataset):
    """Examples as dictionaries, as data sets of Hugging Face return them."""

    def __init__(self, **columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns["labels"])

    def __getitem__(self, index):
        return {name: values[index] for name, values in self.columns.items()}


def make_bert():
    """Returns a text classifier."""
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(vocab_size=20, max_position_embeddings=8, initializer_range=0.4, **SIZES)
    )


def make_vit():
    """Returns an image classifier."""
    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_channels=1, **SIZES))


def texts(count=48):
    """Sentences whose class is that of their first word."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(20, (count, 5), generator=generator)
    labels = (words[:, 0] < 10).long()
    return Rows(input_ids=words, attention_mask=torch.ones_like(words), labels=labels)


def images(count=48):
    """Images whose class is the sign of their mean."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 2
    pixels = torch.randn(count, 1, 8, 8, generator=generator) + labels.view(-1, 1, 1, 1)
    return Rows(pixel_values=pixels, labels=labels)


def arguments(folder, **options):
    """Returns settings of a Trainer for a short run on a CPU."""
    settings = {"save_strategy": "no", "report_to": [], "num_train_epochs": 2, "use_cpu": True, "seed": 0}
    settings |= {"per_device_train_batch_size": 8, "learning_rate": 1e-2, "disable_tqdm": True}
    return TrainingArguments(output_dir=str(folder), **settings | options)
