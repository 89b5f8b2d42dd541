"""Networks of many kinds for tests of the conversion."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.conv2(torch.relu(self.norm1(self.conv1(x))))
        return self.head(torch.relu(x + self.norm2(y)).mean((2, 3)))


class TiedAutoencoder(nn.Module):
    """Reads its encoder's weight with a function call."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t())


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix, self.head = (
            nn.Embedding(12, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 12, bias=False),
        )
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(tokens))))


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attention(query, key=key, value=value)[0]


class ScaledLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 0.5 * super().forward(input) + 1.0


@dataclass(frozen=True)
class Case:
    name: str
    network: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    batch_axis: int = 0
    integers: int | None = None
    output: Callable[[Any], Tensor] = field(default=lambda result: result)
    compiles: bool = True
    why: str = ""

    def inputs(self) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(7)
        if self.integers:
            return tuple(torch.randint(self.integers, shape, generator=generator) for shape in self.shapes)
        return tuple(torch.randn(shape, generator=generator) for shape in self.shapes)

    def same_examples(self) -> tuple[Tensor, ...]:
        """The first example repeated, so that only noise can tell the rows apart."""
        return tuple(
            x.narrow(self.batch_axis, 0, 1).expand(x.shape).contiguous()
            if x.ndim > 1
            else x[:1].expand(len(x))
            for x in self.inputs()
        )


def recurrent(kind: type[nn.RNNBase], batch_first: bool) -> Callable[[], nn.Module]:
    return lambda: kind(5, 4, num_layers=2, bidirectional=True, batch_first=batch_first)


def first(result: Any) -> Tensor:
    return result[0]


DYNAMO = "dynamo breaks the graph at torch's recurrent layers by itself, with or without noise"

NETWORKS = [
    Case("mlp", lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), ((6, 4),)),
    Case(
        "conv-batchnorm-without-bias",
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3)
        ),
        ((4, 3, 8, 8),),
    ),
    Case(
        "non-square-kernel", lambda: nn.Conv2d(3, 4, (1, 5), stride=(2, 1), padding=(0, 2)), ((4, 3, 8, 6),)
    ),
    Case("grouped", lambda: nn.Conv2d(6, 4, 3, groups=2), ((4, 6, 7, 7),)),
    Case(
        "depthwise", lambda: nn.Sequential(nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 3, 1)), ((4, 6, 7, 7),)
    ),
    Case("padding-same", lambda: nn.Conv2d(3, 4, 3, padding="same", dilation=2), ((4, 3, 8, 8),)),
    Case("padding-reflect", lambda: nn.Conv2d(3, 4, 3, padding=2, padding_mode="reflect"), ((4, 3, 8, 8),)),
    Case("grey-image", lambda: nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular"), ((4, 1, 6, 6),)),
    Case("one-feature", lambda: nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 2)), ((4, 1),)),
    Case("one-feature-subclass", lambda: ScaledLinear(1, 3), ((4, 1),)),
    Case("depthwise-transposed", lambda: nn.ConvTranspose1d(4, 8, 3, groups=4), ((4, 4, 5),)),
    Case("conv1d", lambda: nn.Conv1d(3, 4, 3), ((4, 3, 9),)),
    Case("conv3d", lambda: nn.Conv3d(2, 3, 2), ((3, 2, 4, 5, 4),)),
    Case("transposed", lambda: nn.ConvTranspose2d(4, 3, 3, stride=2, output_padding=1), ((4, 4, 5, 5),)),
    Case("attention", lambda: Attention(batch_first=True), ((4, 5, 8),)),
    Case("attention-sequence-first", Attention, ((5, 4, 8),), batch_axis=1),
    Case("cross-attention", CrossAttention, ((4, 5, 8), (4, 7, 6), (4, 7, 4))),
    Case(
        "transformer-encoder-layer",
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        ((4, 5, 8),),
    ),
    Case(
        "transformer-encoder-layer-sequence-first",
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0),
        ((5, 4, 8),),
        batch_axis=1,
    ),
    Case(
        "transformer-encoder",
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        ((4, 5, 8),),
    ),
    Case("lstm", recurrent(nn.LSTM, True), ((4, 6, 5),), output=first, compiles=False, why=DYNAMO),
    Case(
        "lstm-time-first",
        recurrent(nn.LSTM, False),
        ((6, 4, 5),),
        1,
        output=first,
        compiles=False,
        why=DYNAMO,
    ),
    Case("gru", recurrent(nn.GRU, True), ((4, 6, 5),), output=first, compiles=False, why=DYNAMO),
    Case(
        "gru-time-first", recurrent(nn.GRU, False), ((6, 4, 5),), 1, output=first, compiles=False, why=DYNAMO
    ),
    Case("gru-cell", lambda: nn.GRUCell(5, 4), ((4, 5),)),
    Case("tied-weights", TiedLanguageModel, ((4, 3),), integers=12),
    Case("embedding", lambda: nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 2)), ((4, 3),), integers=9),
    Case("reads-anothers-weight", TiedAutoencoder, ((4, 6),)),
    Case("linear-subclass", lambda: nn.Sequential(ScaledLinear(4, 6), nn.ReLU(), nn.Linear(6, 2)), ((5, 4),)),
    Case("spectral-norm", lambda: nn.Sequential(spectral_norm(nn.Linear(4, 6)), nn.Linear(6, 2)), ((5, 4),)),
    Case(
        "weight-norm", lambda: nn.Sequential(weight_norm(nn.Conv2d(3, 4, 3)), nn.Flatten()), ((5, 3, 5, 5),)
    ),
    Case("bare-linear", lambda: nn.Linear(4, 3), ((5, 4),)),
    Case("residual", Residual, ((4, 3, 8, 8),)),
]
