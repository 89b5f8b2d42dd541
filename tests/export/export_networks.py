"""Small networks of many kinds, each with inputs, for tests of exported files."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def images(rows: int, channels: int = 1, side: int = 8) -> Tensor:
    return torch.randn(rows, channels, side, side, generator=torch.Generator().manual_seed(rows))


def vectors(rows: int, *shape: int) -> Tensor:
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(rows))


def tokens(rows: int, length: int = 5, vocabulary: int = 11) -> Tensor:
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(rows))


def lenet() -> nn.Module:
    features = [nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2), nn.ReLU()]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


def vgg() -> nn.Module:
    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(*block(3, 4), *block(4, 6), nn.Flatten(), nn.Linear(24, 3))


class ResidualNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.shortcut, self.head = nn.Conv2d(4, 4, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        x = self.second(self.first(x).relu()) + self.shortcut(x)
        return self.head(x.relu().mean((2, 3)))


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 4, 2, stride=2), nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.norm, self.wide, self.narrow = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.narrow(nn.functional.gelu(self.wide(y))).permute(0, 3, 1, 2)
        return self.head((x + y).mean((2, 3)))


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depthwise, self.pointwise = nn.Conv2d(3, 6, 3, groups=3), nn.Conv2d(6, 4, 1)
        self.norm, self.gate, self.head = nn.GroupNorm(2, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.silu(self.norm(self.pointwise(self.depthwise(x))))
        x = x * torch.sigmoid(self.gate(x.mean((2, 3))))[..., None, None]
        return self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, self.first(x).relu()], 1)
        x = torch.cat([x, self.second(x).relu()], 1)
        return self.head(x.amax((2, 3)))


class TemporalNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, 4, 3, padding=2, dilation=1)
        self.second = nn.Conv1d(4, 4, 3, padding=4, dilation=2)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[2]
        x = self.first(x)[..., :length].relu()
        return self.head(self.second(x)[..., :length].relu()[..., -1])


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], batch_first: bool) -> None:
        super().__init__()
        self.rnn, self.head = kind(2, 4, batch_first=batch_first), nn.Linear(4, 3)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        if self.rnn.batch_first:
            return self.head(self.rnn(x)[0][:, -1])
        return self.head(self.rnn(x.transpose(0, 1))[0][-1])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.embed, self.head = nn.Embedding(11, 4), nn.Linear(4, 3)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)).mean(1))


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.positions = nn.Conv2d(1, 4, 4, stride=4), nn.Parameter(torch.randn(5, 4))
        self.token, self.norm = nn.Parameter(torch.randn(1, 1, 4)), nn.LayerNorm(4)
        self.query, self.values, self.head = nn.Linear(4, 8), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        query, key = self.query(self.norm(x)).chunk(2, -1)
        weights = (query @ key.transpose(1, 2) / 2.0).softmax(-1)
        return self.head((x + weights @ self.values(x))[:, 0])


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(torch.tanh(self.left(left)) * self.right(right))


class NamedInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.dense, self.head = nn.Embedding(11, 4), nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, words: Tensor, numbers: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.embed(words).mean(1) + self.dense(numbers).tanh())}


class DeepSet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).relu().sum(1))


class SoftExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return sum(weights[:, i, None] * expert(x) for i, expert in enumerate(self.experts))  # type: ignore[return-value]


class FlattenedSteps(nn.Module):
    """Network whose layers see the time steps of all examples as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.frame, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        frames = self.frame(x.flatten(0, 1)).relu()
        return self.head(frames.unflatten(0, (-1, x.shape[1])).mean(1))


def upsampler() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(1, 2, 2, stride=2), nn.ELU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(32, 3)
    )


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = BertConfig(vocab_size=11, max_position_embeddings=8, num_labels=3, **sizes)
    return BertForSequenceClassification(config)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=3, **sizes)
    return ViTForImageClassification(config)


def bert_inputs(rows: int) -> dict[str, Tensor]:
    mask = torch.ones(rows, 5, dtype=torch.long)
    mask[:, 4] = 0
    return {"input_ids": tokens(rows), "attention_mask": mask}


Case = tuple[Callable[[], nn.Module], Callable[[int], Any]]
NETWORKS: dict[str, Case] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
        lambda rows: vectors(rows, 4),
    ),
    "lenet": (lenet, images),
    "vgg": (vgg, lambda rows: images(rows, 3)),
    "resnet": (ResidualNetwork, lambda rows: images(rows, 3)),
    "convnext": (ConvNeXt, lambda rows: images(rows, 3)),
    "mobilenet": (MobileNet, lambda rows: images(rows, 3)),
    "densenet": (DenseNet, images),
    "upsampler": (upsampler, images),
    "tcn": (TemporalNetwork, lambda rows: vectors(rows, 2, 6)),
    "lstm": (lambda: Recurrent(nn.LSTM, True), lambda rows: vectors(rows, 6, 2)),
    "gru": (lambda: Recurrent(nn.GRU, False), lambda rows: vectors(rows, 6, 2)),
    "transformer": (Encoder, tokens),
    "vision transformer": (VisionTransformer, images),
    "bert": (bert, bert_inputs),
    "vit": (vit, lambda rows: {"pixel_values": images(rows)}),
    "two inputs": (TwoInputs, lambda rows: (vectors(rows, 3), vectors(rows, 2))),
    "named inputs": (NamedInputs, lambda rows: {"words": tokens(rows), "numbers": vectors(rows, 2)}),
    "deep set": (DeepSet, lambda rows: vectors(rows, 6, 2)),
    "experts": (SoftExperts, lambda rows: vectors(rows, 4)),
    "flattened steps": (FlattenedSteps, lambda rows: vectors(rows, 6, 2)),
}
