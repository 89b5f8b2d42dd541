"""Architectures of papers and repositories: vision, sequences, sets and graphs, tables, fields and functions."""

from typing import Any

import torch
from tests.stress.subjects import Calls
from tests.user_networks.cases import ROWS, add, halves, normal, words
from torch import Tensor, nn
from torch.nn import functional as F

import flowbnn as fb

# -------------------- vision


class DenseBlock(nn.Module):
    """Layers that take the outputs of all previous layers (DenseNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(2 + 3 * i), nn.ReLU(), nn.Conv2d(2 + 3 * i, 3, 3, padding=1)) for i in range(3)
        )  # fmt: skip
        self.head = nn.Linear(11, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.head(F.adaptive_avg_pool2d(torch.cat(features, 1), 1).flatten(1))


class InvertedResidual(nn.Module):
    """Inverted residual with depthwise convolution, hard activations and squeeze and excitation (MobileNetV3)."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.norm = nn.Conv2d(2, 6, 1, bias=False), nn.BatchNorm2d(6)
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.squeeze, self.excite = nn.Conv2d(6, 2, 1), nn.Conv2d(2, 6, 1)
        self.project, self.head = nn.Conv2d(6, 2, 1), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardswish(self.depthwise(F.relu6(self.norm(self.expand(x)))))
        y = y * F.hardsigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        return self.head((x + self.project(y)).mean([-1, -2]))


class Fire(nn.Module):
    """Squeeze convolution with two expanding ones (SqueezeNet), and the classes as channels."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(2, 2, 1)
        self.narrow, self.wide = nn.Conv2d(2, 3, 1), nn.Conv2d(2, 3, 3, padding=1)
        self.classes = nn.Sequential(
            nn.Dropout(0.1), nn.Conv2d(6, 3, 1), nn.ReLU(), nn.AdaptiveAvgPool2d((1, 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.squeeze(x).relu_()
        return self.classes(torch.cat([self.narrow(x), self.wide(x)], 1).relu()).flatten(1)


class WindowAttention(nn.Module):
    """Shifted windows with a table of relative positions (Swin)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Conv2d(2, 4, 1), nn.Linear(4, 12), nn.Linear(4, 4)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)
        self.bias = nn.Parameter(torch.zeros(9, 2))
        places = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        relative = (places[:, :, None] - places[:, None]) + 1
        self.register_buffer("index", relative[0] * 3 + relative[1], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).permute(0, 2, 3, 1)
        batch, height, width, channels = x.shape
        windows = torch.roll(self.norm(x), (-1, -1), (1, 2))
        windows = windows.view(batch, height // 2, 2, width // 2, 2, channels)
        windows = windows.permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, channels)
        q, k, v = self.qkv(windows).reshape(len(windows), 4, 3, 2, 2).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * 2**-0.5 + self.bias[self.get_buffer("index")].permute(2, 0, 1)
        windows = self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, 4, channels))
        windows = windows.view(batch, height // 2, width // 2, 2, 2, channels).permute(0, 1, 3, 2, 4, 5)
        windows = torch.roll(windows.reshape(x.shape), (1, 1), (1, 2))
        return self.head((x + windows).mean((1, 2)))


class Capsules(nn.Module):
    """Capsules with routing by agreement, whose lengths are the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.primary = nn.Conv2d(2, 8, 3, stride=2)
        self.votes = nn.Parameter(0.3 * torch.randn(8, 3, 5, 4))

    def forward(self, x: Tensor) -> Tensor:
        capsules = self.squash(self.primary(x).unflatten(1, (2, 4)).flatten(3).transpose(2, 3).flatten(1, 2))
        votes = torch.einsum("bic,ikdc->bikd", capsules, self.votes)
        logits = votes.new_zeros(votes.shape[:3])
        for _ in range(2):
            outputs = self.squash((logits.softmax(2).unsqueeze(-1) * votes).sum(1))
            logits = logits + (votes * outputs.unsqueeze(1)).sum(-1)
        return outputs.norm(dim=-1)

    def squash(self, x: Tensor) -> Tensor:
        square = x.square().sum(-1, keepdim=True)
        return square / (1.0 + square) * x / (square + 1e-6).sqrt()


class SpatialTransformer(nn.Module):
    """Images that are resampled on a predicted grid."""

    def __init__(self) -> None:
        super().__init__()
        self.localize, self.conv, self.head = nn.Linear(72, 6), nn.Conv2d(2, 3, 3), nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        identity = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0]).to(x)
        angles = identity + 0.1 * torch.tanh(self.localize(x.flatten(1)))
        grid = F.affine_grid(angles.view(-1, 2, 3), list(x.shape), align_corners=False)
        return self.head(self.conv(F.grid_sample(x, grid, align_corners=False)).flatten(1))


def attention_unet(net: Any, x: Tensor) -> Tensor:
    """U-Net with a gate on its skip, bilinear upsampling and group norm."""
    skip = F.silu(net.norm(net.down(x)))
    deep = F.silu(net.bottom(F.avg_pool2d(skip, 2)))
    up = F.interpolate(deep, scale_factor=2, mode="bilinear", align_corners=False)
    return net.last(torch.cat([skip * torch.sigmoid(net.gate(up)), up], dim=1))


def images() -> Tensor:
    return normal(ROWS, 2, 6, 6)


PIXELS = (normal(ROWS, 6, 6) > 0).long() + (normal(ROWS, 6, 6) > 1).long()

add("densenet", DenseBlock, lambda: halves(images()))
add("mobilenet squeeze excitation", InvertedResidual, lambda: halves(images()))
add("squeezenet", Fire, lambda: halves(images()))
add("shifted windows", WindowAttention, lambda: halves(images()))
add("capsules", Capsules, lambda: halves(images()))
add("spatial transformer", SpatialTransformer, lambda: halves(images()))
add(
    "attention unet",
    lambda: Calls(
        attention_unet,
        down=nn.Conv2d(2, 4, 3, padding=1),
        norm=nn.GroupNorm(2, 4),
        bottom=nn.Conv2d(4, 4, 3, padding=1),
        gate=nn.Conv2d(4, 4, 1),
        last=nn.Conv2d(8, 3, 1),
    ),
    lambda: halves(images(), PIXELS),
)
add(
    "volumes to volumes",
    lambda: nn.Sequential(nn.Conv3d(1, 4, 2), nn.ReLU(), nn.ConvTranspose3d(4, 3, 2)),
    lambda: halves(normal(ROWS, 1, 4, 4, 4), (normal(ROWS, 4, 4, 4) > 0).long()),
)
add(
    "pixel shuffle regression",
    lambda: nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.PixelShuffle(2), nn.Flatten(), nn.Linear(288, 2)),
    lambda: halves(images(), normal(ROWS, 2)),
    calibrator="noise",
)
add(
    "image to image regression",
    lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 1, 1)),
    lambda: halves(images(), images()[:, :1]),
    calibrator="noise",
)
add(
    "mean and variance of every token",
    lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)),
    lambda: halves(normal(ROWS, 5, 3), normal(ROWS, 5)),
    likelihood=fb.likelihoods.Gaussian("predicted"),
    calibrator="noise",
)
add(
    "mixer",
    lambda: Calls(
        lambda net, x: net.head(net.channels(net.tokens(net.patch(x).flatten(2)).mT).mean(1)),
        patch=nn.Conv2d(2, 4, 2, stride=2),
        tokens=nn.Sequential(nn.LayerNorm(9), nn.Linear(9, 9), nn.GELU()),
        channels=nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU()),
        head=nn.Linear(4, 3),
    ),
    lambda: halves(images()),
)
add(
    "fully convolutional any size",
    lambda: nn.Sequential(
        nn.ReflectionPad2d(1), nn.Conv2d(2, 4, 3, dilation=2), nn.LeakyReLU(0.1, inplace=True),
        nn.LPPool2d(2, 2), nn.Conv2d(4, 3, 1), nn.AdaptiveMaxPool2d(1), nn.Flatten(),
    ),
    lambda: halves(images()),
)  # fmt: skip

# -------------------- sequences


class WaveNet(nn.Module):
    """Gated dilated causal convolutions with skip connections, and a class for every step, ``[B, C, T]``."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv1d(1, 4, 1)
        self.gates = nn.ModuleList(nn.Conv1d(4, 8, 2, dilation=2**i, padding=2**i) for i in range(2))
        self.skips = nn.ModuleList(nn.Conv1d(4, 4, 1) for _ in range(2))
        self.end = nn.Conv1d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        total = torch.zeros_like(x)
        for gate, skip in zip(self.gates, self.skips, strict=True):
            y = F.glu(gate(x)[..., : x.shape[-1]], dim=1)
            total = total + skip(y)
            x = x + y
        return self.end(F.relu(total))


class AttentionDecoder(nn.Module):
    """Sequence to sequence with additive attention and teacher forcing."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(12, 4, padding_idx=0), nn.Embedding(12, 4)
        self.encoder, self.cell = nn.GRU(4, 4, batch_first=True), nn.GRUCell(8, 4)
        self.query, self.key, self.score = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 1)
        self.head = nn.Linear(4, 5)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, state = self.encoder(self.source(source))
        state, outputs = state.squeeze(0), []
        for step in range(target.size(1)):
            scores = self.score(torch.tanh(self.query(state).unsqueeze(1) + self.key(memory))).squeeze(-1)
            scores = scores.masked_fill(source == 0, -1e9)
            context = torch.bmm(scores.softmax(-1).unsqueeze(1), memory).squeeze(1)
            state = self.cell(torch.cat([self.target(target[:, step]), context], -1), state)
            outputs.append(self.head(state))
        return torch.stack(outputs, 1)


class Decoder(nn.Module):
    """Language model of ``TransformerDecoder`` with a causal mask, positions and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(12, 8), nn.Embedding(6, 8)
        layer = nn.TransformerDecoderLayer(8, 2, 8, 0.0, "gelu", batch_first=True, norm_first=True)
        self.decoder, self.head = nn.TransformerDecoder(layer, 1), nn.Linear(8, 12, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device))
        mask = torch.triu(torch.full((length, length), float("-inf"), dtype=x.dtype), 1)
        return self.head(self.decoder(x, x, tgt_mask=mask, memory_mask=mask))


class Packed(nn.Module):
    """Bidirectional GRU on packed sequences, padded again, with a class for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(3, 4, bidirectional=True, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), True, enforce_sorted=False)
        outputs, _ = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], True, total_length=x.shape[1])
        return self.head(outputs)


class RelativeAttention(nn.Module):
    """Attention with rotary positions, grouped queries, RMS norm and a gated MLP (Llama by hand)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(12, 8), nn.RMSNorm(8)
        self.q, self.k, self.v = nn.Linear(8, 8, False), nn.Linear(8, 4, False), nn.Linear(8, 4, False)
        self.gate, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def rotate(self, x: Tensor) -> Tensor:
        angle = torch.outer(torch.arange(x.shape[2]), torch.tensor([1.0, 0.1])).to(x)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True, enable_gqa=True)
        x = x + y.transpose(1, 2).flatten(2)
        return self.head((x + self.down(F.silu(self.gate(x)) * self.up(x)))[:, -1])


class StateSpace(nn.Module):
    """Diagonal state space model, scanned step by step (S4, Mamba)."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.inputs = nn.Parameter(torch.rand(4)), nn.Linear(2, 4)
        self.step, self.head = nn.Linear(2, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        state, steps = torch.zeros(len(x), 4).to(x), F.softplus(self.step(x))
        for index in range(x.shape[1]):
            state = torch.exp(-self.decay.exp() * steps[:, index]) * state + self.inputs(x[:, index])
        return self.head(state)


class Perceiver(nn.Module):
    """Latents that attend to the inputs, time first."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(2, 1, 8))
        self.embed, self.attend = nn.Linear(3, 8), nn.MultiheadAttention(8, 2)
        self.refine = nn.TransformerEncoderLayer(8, 2, 8, 0.0)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).transpose(0, 1)
        latents = self.latents.repeat(1, tokens.shape[1], 1)
        latents = latents + self.attend(latents, tokens, tokens)[0]
        return self.head(self.refine(latents).mean(0))


class Spikes(nn.Module):
    """Leaky integrate-and-fire units over time, with a surrogate gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        potential, total = 0.0, 0.0
        for _ in range(4):
            potential = 0.9 * potential + self.first(x)
            soft = torch.sigmoid(5.0 * (potential - 0.5))
            spikes = (potential > 0.5).to(x) + soft - soft.detach()
            potential = potential * (1.0 - spikes.detach())
            total = total + self.head(spikes)
        return total / 4.0


TAGS = words(ROWS, 5, vocabulary=3)
STEPS = normal(ROWS, 5, 3)
LENGTHS = torch.arange(ROWS) % 4 + 2

add("wavenet", WaveNet, lambda: halves(normal(ROWS, 1, 8), words(ROWS, 8, vocabulary=3)))
add(
    "attention decoder",
    AttentionDecoder,
    lambda: halves((words(ROWS, 5), words(ROWS, 4)), words(ROWS, 4, vocabulary=5)),
)
add("language model decoder", Decoder, lambda: halves(words(ROWS, 5), words(ROWS, 5)))
add(
    "padded tagger lengths",
    Packed,
    lambda: halves((STEPS, LENGTHS), TAGS.masked_fill(torch.arange(5) >= LENGTHS[:, None], -100)),
)
add("rotary attention", RelativeAttention, lambda: halves(words(ROWS, 5)))
add("state space", StateSpace, lambda: halves(normal(ROWS, 5, 2), normal(ROWS, 1)), calibrator="noise")
add("perceiver", Perceiver, lambda: halves(STEPS))
add("spiking", Spikes, lambda: halves(normal(ROWS, 4)))

# -------------------- sets, graphs and point clouds


class PointNet(nn.Module):
    """Points with a predicted transformation and a maximum over points."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = nn.Sequential(
            nn.Conv1d(3, 4, 1), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(4, 9)
        )
        self.points = nn.Sequential(nn.Conv1d(3, 6, 1), nn.BatchNorm1d(6), nn.ReLU())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        matrix = self.transform(x).view(-1, 3, 3) + torch.eye(3, device=x.device, dtype=x.dtype)
        return self.head(self.points(torch.bmm(matrix, x)).max(2)[0])


class GraphAttention(nn.Module):
    """Graph attention on dense adjacency matrices, with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.left, self.right = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        values = self.values(x)
        scores = F.leaky_relu(self.left(values) + self.right(values).transpose(1, 2), 0.2)
        weights = scores.masked_fill(adjacency == 0, float("-inf")).softmax(-1)
        return self.head(F.elu(weights @ values).mean(1))


class NormalizedGraph(nn.Module):
    """Graph convolutions with a fixed adjacency matrix in a buffer, for time series at its nodes."""

    def __init__(self) -> None:
        super().__init__()
        matrix = torch.eye(4) + torch.roll(torch.eye(4), 1, 0)
        self.register_buffer("matrix", matrix / matrix.sum(1, keepdim=True))
        self.first, self.head = nn.Linear(3, 4), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(
            torch.tanh(torch.einsum("ij,bjf->bif", self.get_buffer("matrix"), self.first(x))).flatten(1)
        )


class SetTransformer(nn.Module):
    """Pooling by attention with a learned seed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Linear(3, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.pool, self.seed = (
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.Parameter(torch.randn(1, 1, 8)),
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.mix(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        return self.head(self.pool(self.seed.expand(x.size(0), -1, -1), x, x, padding)[0].squeeze(1))


def neighbours() -> Tensor:
    return (torch.eye(5) + torch.roll(torch.eye(5), 1, 0)).expand(ROWS, -1, -1).contiguous()


add("pointnet", PointNet, lambda: halves(STEPS))
add("dense graph attention", GraphAttention, lambda: halves((STEPS, neighbours())))
add(
    "graph of sensors",
    NormalizedGraph,
    lambda: halves(normal(ROWS, 4, 3), normal(ROWS, 2)),
    calibrator="noise",
)
add("set transformer", SetTransformer, lambda: halves((STEPS, torch.arange(5) >= LENGTHS[:, None])))
