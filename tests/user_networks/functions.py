"""Networks of tables, pairs, fields and functions."""

from typing import Any

import torch
from tests.user_networks.cases import CLASSES, ROWS, add, halves, mlp, normal, words
from torch import Tensor, nn
from torch.nn import functional as F

# -------------------- tables and pairs


class TabTransformer(nn.Module):
    """Attention over embeddings of categories, joined with normalized numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 8) for size in (3, 5))
        self.mix = nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True)
        self.norm, self.head = nn.LayerNorm(2), nn.Sequential(nn.Linear(18, 6), nn.SELU(), nn.Linear(6, 3))

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        columns = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        return self.head(torch.cat([self.mix(torch.stack(columns, 1)).flatten(1), self.norm(numbers)], 1))


class WideAndDeep(nn.Module):
    """Bag of categories beside a deep network, with cross features, for clicks."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.deep = nn.EmbeddingBag(12, 1, mode="sum"), mlp(1)
        self.cross = nn.Parameter(0.1 * torch.randn(4))

    def forward(self, items: Tensor, x: Tensor) -> Tensor:
        crossed = x * (x @ self.cross).unsqueeze(1) + x
        return (self.wide(items) + self.deep(crossed)).squeeze(-1)


class TwoTowers(nn.Module):
    """Recommender whose score is the product of two embeddings and two biases."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(12, 4), nn.Embedding(12, 4)
        self.user_bias, self.item_bias = nn.Embedding(12, 1), nn.Embedding(12, 1)
        self.tower = nn.Linear(4, 4)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        score = (self.tower(self.user(user)) * self.item(item)).sum(-1)
        return score + self.user_bias(user)[:, 0] + self.item_bias(item)[:, 0]


class DualEncoder(nn.Module):
    """Images against prompts of classes, with a learned temperature (CLIP)."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(8, 4), nn.Embedding(12, 4)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("prompts", torch.tensor([[1, 2], [3, 4], [5, 6]]))

    def forward(self, pixel_values: Tensor) -> Tensor:
        images = F.normalize(self.image(pixel_values.flatten(1)), dim=-1)
        texts = F.normalize(self.text(self.get_buffer("prompts")).mean(1), dim=-1)
        return self.logit_scale.exp() * images @ texts.t()


class HyperNetwork(nn.Module):
    """Network that makes the weights of another for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.head = nn.Linear(2, 4 * 6 + 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        weights, bias = self.make(context).split([24, 6], dim=-1)
        return self.head(torch.tanh(torch.einsum("bi,bio->bo", x, weights.view(-1, 4, 6)) + bias))


class FiLM(nn.Module):
    """Channels that are scaled and shifted by a second input, which may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.film, self.head = nn.Conv2d(2, 4, 3), nn.Linear(3, 8), nn.Linear(4, 3)

    def forward(self, image: Tensor, condition: Tensor | None = None, scale: float = 1.0) -> Tensor:
        x = self.conv(image)
        if condition is not None:
            gamma, beta = self.film(condition)[..., None, None].chunk(2, 1)
            x = (1 + scale * gamma) * x + beta
        return self.head(F.elu(x).mean((2, 3)))


class SoftExperts(nn.Module):
    """Mixture of all experts by a soft gate, with stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 3), nn.ModuleList(mlp() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (self.gate(x).softmax(-1).unsqueeze(-1) * outputs).sum(1)


class ProductOfPairs(nn.Module):
    """Bilinear interaction of two inputs, cosine similarity and distances."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.pair, self.head = mlp(4), nn.Bilinear(4, 4, 3), nn.Linear(5, 3)

    def forward(self, pair: Any) -> Tensor:
        a, b = self.trunk(pair[0]), self.trunk(pair[1])
        similar = torch.stack([F.cosine_similarity(a, b), (a - b).pow(2).sum(1).sqrt()], 1)
        return self.head(torch.cat([self.pair(a, b), similar], 1))


clicks = (CLASSES > 0).float()
add("tab transformer", TabTransformer, lambda: halves((words(ROWS, 2, vocabulary=3), normal(ROWS, 2))))
add(
    "wide and deep clicks",
    WideAndDeep,
    lambda: halves((words(ROWS, 3), normal(ROWS, 4)), clicks),
    likelihood="bernoulli",
)
add(
    "two towers ratings",
    TwoTowers,
    lambda: halves((words(ROWS), words(ROWS).flip(0)), normal(ROWS, 1)[:, 0]),
    calibrator="noise",
)
add("dual encoder prompts", DualEncoder, lambda: halves(normal(ROWS, 2, 2, 2)))
add("hypernetwork", HyperNetwork, lambda: halves((normal(ROWS, 4), normal(ROWS, 2))))
add(
    "film by keyword",
    FiLM,
    lambda: halves({"image": normal(ROWS, 2, 6, 6), "condition": normal(ROWS, 3)}),
)
add("soft experts", SoftExperts, lambda: halves(normal(ROWS, 4)))
add(
    "list of two inputs",
    ProductOfPairs,
    lambda: [(([a, b],), y) for (a, b), y in halves((normal(ROWS, 4), normal(ROWS, 4) + 1))],
)

# -------------------- fields and functions


class Sine(nn.Module):
    """Layer with sines as activation (SIREN)."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, outputs)
        with torch.no_grad():
            self.linear.weight.uniform_(-1 / width, 1 / width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(3.0 * self.linear(x))


class RadianceField(nn.Module):
    """Color and density of points by Fourier features, with a skip connection (NeRF)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bands", 2.0 ** torch.arange(2))
        self.trunk, self.skip = nn.Linear(15, 6), nn.Linear(21, 6)
        self.density, self.color = nn.Linear(6, 1), nn.Linear(9, 3)

    def forward(self, points: Tensor, directions: Tensor) -> Tensor:
        scaled = (points.unsqueeze(-1) * self.get_buffer("bands")).flatten(1)
        features = torch.cat([points, scaled.sin(), scaled.cos()], -1)
        hidden = F.relu(self.skip(torch.cat([features, F.relu(self.trunk(features))], -1)))
        color = torch.sigmoid(self.color(torch.cat([hidden, F.normalize(directions, dim=-1)], -1)))
        return torch.cat([color, F.softplus(self.density(hidden))], -1)


class FourierOperator(nn.Module):
    """Convolution by complex weights in Fourier space (FNO), with a value for every point."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.skip, self.project = nn.Linear(1, 4), nn.Conv1d(4, 4, 1), nn.Linear(4, 1)
        self.weights = nn.Parameter(0.2 * torch.randn(4, 4, 3, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x.unsqueeze(-1)).transpose(1, 2)
        modes = torch.einsum("bix,iox->box", torch.fft.rfft(x)[..., :3], self.weights)
        x = F.gelu(torch.fft.irfft(modes, n=x.shape[-1]) + self.skip(x))
        return self.project(x.transpose(1, 2)).squeeze(-1)


class Physics(nn.Module):
    """Function whose derivative by its input is an output as well (PINN)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            value = self.body(x)
            slope = torch.autograd.grad(value.sum(), x, create_graph=True)[0]
        return torch.cat([value, slope[:, :1]], 1)


class RadialBasis(nn.Module):
    """Gaussian kernels around learned centers, before a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.centers, self.log_width = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.zeros(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.exp(-torch.cdist(x, self.centers).square() * self.log_width.exp()))


class Equilibrium(nn.Module):
    """Fixed point of a layer, found without gradients (DEQ)."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.state, self.head = nn.Linear(4, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        state, inputs = x.new_zeros(x.shape[0], 5), self.inputs(x)
        with torch.no_grad():
            for _ in range(10):
                state = torch.tanh(inputs + 0.3 * self.state(state))
        return self.head(torch.tanh(inputs + 0.3 * self.state(state)))


class TiedAutoencoder(nn.Module):
    """Autoencoder whose decoder has the transposed weights of its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.bias = nn.Linear(4, 2), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.bias)


add(
    "siren",
    lambda: nn.Sequential(Sine(2, 6), Sine(6, 6), nn.Linear(6, 1)),
    lambda: halves(normal(ROWS, 2), normal(ROWS, 1)),
    calibrator="noise",
)
add(
    "radiance field",
    RadianceField,
    lambda: halves((normal(ROWS, 3), normal(ROWS, 3) + 1), normal(ROWS, 4)),
    calibrator="noise",
)
add(
    "fourier operator",
    FourierOperator,
    lambda: halves(normal(ROWS, 8), normal(ROWS, 8)),
    calibrator="noise",
    double=False,
)
add(
    "physics informed",
    Physics,
    lambda: halves(normal(ROWS, 2), normal(ROWS, 2)),
    calibrator="noise",
    refusals={"calibrate": "unsupported"},
)
add("radial basis", RadialBasis, lambda: halves(normal(ROWS, 4)))
add("equilibrium", Equilibrium, lambda: halves(normal(ROWS, 4)))
add("tied autoencoder", TiedAutoencoder, lambda: halves(normal(ROWS, 4), normal(ROWS, 4)), calibrator="noise")
