"""Small networks with outputs for pixels, tokens and several labels, and their data."""

import torch
from torch import Tensor, nn


class TinyUNet(nn.Module):
    """U-Net with one skip connection and a 1x1 convolution at the end."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.down, self.bottom = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(4, 4, 2, stride=2), nn.Conv2d(8, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x).relu()
        deep = self.bottom(nn.functional.max_pool2d(skip, 2)).relu()
        return self.last(torch.cat([skip, self.up(deep)], 1))


class Tagger(nn.Module):
    """Bidirectional LSTM with a class for every token, ``[B, T, C]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.lstm = nn.LSTM(6, 6, batch_first=True, bidirectional=True)
        self.last = nn.Linear(12, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.lstm(self.embedding(tokens))[0])


def make_structured(name: str, examples: int = 24) -> tuple[nn.Module, Tensor, Tensor]:
    """Returns a network, inputs and targets with ignored positions: ``"pixels"``, ``"mask"``, ``"tokens"`` or ``"labels"``."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "labels":
            network: nn.Module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
            inputs = torch.randn(examples, 5, generator=generator)
            noise = torch.randn(examples, 3, generator=generator)
            return network, inputs, (inputs[:, :3] + 0.5 * noise > 0).float()
        if name == "tokens":
            tokens = torch.randint(12, (examples, 7), generator=generator)
            targets = (tokens + torch.randint(2, tokens.shape, generator=generator)) % 4
            targets[::2, 5:] = -100
            return Tagger(), tokens, targets
        inputs = torch.randn(examples, 1, 6, 6, generator=generator)
        noisy = inputs + 0.5 * torch.randn(inputs.shape, generator=generator)
        if name == "mask":
            return TinyUNet(1), inputs, (noisy > 0).float()
        targets = (noisy[:, 0] > 0.5).long() + (noisy[:, 0] > -0.5).long()
        targets[:, 0] = -100
        return TinyUNet(), inputs, targets


POSITIONS = {"pixels": (6, 6), "mask": (6, 6), "tokens": (7,), "labels": (3,)}
