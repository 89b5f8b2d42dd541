"""More networks of plain torch: unusual inputs, outputs, weights and forward passes."""

from typing import Any

import torch
from tests.stress.subjects import Calls
from tests.user_networks.cases import CLASSES, ROWS, add, add_subject, halves, mlp, normal, words
from torch import Tensor, nn
from torch.nn import functional as F

import flowbnn as fb

# -------------------- 23 to 49 of the list

add_subject("dict inputs", "dictionary_inputs")


class WholeDictionary(nn.Module):
    """Network that takes the dictionary as one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.layer(batch["a"] + batch["b"])


add(
    "dict as one arg",
    WholeDictionary,
    lambda: halves({"a": normal(ROWS, 4), "b": normal(ROWS, 4)}),
    calibrator="noise",
)


class TwoHeads(nn.Module):
    """Network with two heads, as a tuple or as a dictionary with features."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.label, self.value = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 1)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        if self.kind == "tuple":
            return self.label(hidden), self.value(hidden)
        return {"logits": self.label(hidden), "features": hidden}


add(
    "multi output tuple",
    lambda: TwoHeads("tuple"),
    lambda: halves(normal(ROWS, 4), (CLASSES, normal(ROWS, 1))),
    likelihood=fb.likelihoods.Heads({"label": "categorical", "value": "gaussian"}),
    calibrator="noise",
)
add("dict output logits", lambda: TwoHeads("dictionary"), lambda: halves(normal(ROWS, 4)))
add_subject("mixed raw parameter", "raw_parameter")


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(3))


def initialized() -> nn.Module:
    network = lazy()
    network(normal(2, 4))
    return network


add("lazy uninit", lazy, lambda: halves(normal(ROWS, 4)), refusals={"convert": "network"}, double=False)
add("lazy init", initialized, lambda: halves(normal(ROWS, 4)))


class QuantizedLinear(nn.Module):
    """Stand-in for a dynamically quantized layer, which torch cannot build on every machine: weights are integers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 128, (3, 4), dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.get_buffer("weight").to(x.dtype).T / 127.0


add("quantized dynamic", QuantizedLinear, lambda: halves(normal(ROWS, 4)), refusals={"convert": "model"})
add(
    "jit script",
    lambda: torch.jit.trace(mlp(), normal(2, 4)),
    lambda: halves(normal(ROWS, 4)),
    refusals={"convert": "network"},
    double=False,
)
add("bfloat16 model", lambda: mlp().bfloat16(), lambda: halves(normal(ROWS, 4)), tolerance=2e-2, double=False)
add("all frozen", lambda: mlp().requires_grad_(False), lambda: halves(normal(ROWS, 4)))
add("meta device", lambda: mlp().to("meta"), lambda: halves(normal(ROWS, 4)), refusals={"convert": "network"})
add_subject("grad checkpoint nonreentrant", "activation_checkpointing", refusals={"calibrate": "unsupported"})
add("data parallel", lambda: nn.DataParallel(mlp()), lambda: halves(normal(ROWS, 4)))
add_subject("functional dropout", "functional_dropout")


class AlwaysDropout(nn.Sequential):
    """Network with dropout that is never off."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.2, training=True)


add(
    "always dropout",
    lambda: AlwaysDropout(*mlp()),
    lambda: halves(normal(ROWS, 4)),
    tolerance=float("inf"),
    refusals={"calibrate": "random"},
)
add("single logit float targets", lambda: mlp(1), lambda: halves(normal(ROWS, 4), (CLASSES > 0).float()))
add(
    "single logit bernoulli",
    lambda: mlp(1),
    lambda: halves(normal(ROWS, 4), (CLASSES > 0).float()),
    likelihood="bernoulli",
)
add_subject("numpy style double data", "double_data", double=False)
add_subject("instance norm prelu maxunpool", "instance_norm")


class Bags(nn.Module):
    """Bags of words by offsets, with fewer outputs than words."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(12, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.bag(tokens, offsets))


add(
    "embeddingbag offsets",
    Bags,
    lambda: [((words(30), torch.arange(12) * 2), CLASSES[:12])] * 2,
    refusals={"calibrate": "rows"},
)


class Queries(nn.Module):
    """Learned queries that are read from the weight of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.attention = nn.Embedding(3, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries.weight.expand(len(x), -1, -1)
        return self.head(self.attention(queries, x, x, need_weights=False)[0]).squeeze(-1)


add("detr like queries", Queries, lambda: halves(normal(ROWS, 5, 8)))


class Reparameterized(nn.Module):
    """Network that draws noise of its own in training."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log_std, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.mean(x)
        noise = torch.randn_like(mean) if self.training else 0.0
        return self.head(torch.tanh(mean + self.log_std(x).exp() * noise))


add("vae like reparam", Reparameterized, lambda: halves(normal(ROWS, 4)))


class Centred(nn.Module):
    """Network whose rows interact."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.head(torch.tanh(hidden - hidden.mean(0)))


add(
    "batch stat attention across", Centred, lambda: halves(normal(ROWS, 4)), refusals={"calibrate": "network"}
)


class KANLinear(nn.Module):
    """Linear layer of an own class: a spline-like expansion of every input."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, width, 3) / width)

    def forward(self, x: Tensor) -> Tensor:
        basis = torch.stack([x, x.sin(), x.cos()], -1)
        return torch.einsum("bdk,odk->bo", basis, self.weight)


add(
    "kan like custom layer",
    lambda: nn.Sequential(KANLinear(4, 6), KANLinear(6, 3)),
    lambda: halves(normal(ROWS, 4)),
    refusals={"convert": "model"},
)


class CrossAttention(nn.Module):
    """Attention with own widths of keys and values, and a raw query."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, kdim=3, vdim=5, batch_first=True)
        self.query, self.head = nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 3)

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        return self.head(self.attention(self.query.expand(len(keys), -1, -1), keys, values)[0][:, 0])


add(
    "multichannel timeseries mha kv", CrossAttention, lambda: halves((normal(ROWS, 6, 3), normal(ROWS, 6, 5)))
)

# -------------------- beyond the list

add_subject("pruned", "pruned")
add_subject("frozen trunk", "frozen_trunk")
add_subject("tied weights", "tied_weights")
add_subject("transposed convolution", "transposed_convolution")
add(
    "gru time first",
    lambda: Calls(
        lambda net, x: net.head(net.gru(x.transpose(0, 1))[0][-1]), gru=nn.GRU(3, 4), head=nn.Linear(4, 3)
    ),
    lambda: halves(normal(ROWS, 5, 3)),
)
add(
    "spectral norm",
    lambda: nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 3)
    ),
    lambda: halves(normal(ROWS, 4)),
)
add(
    "conv3d",
    lambda: nn.Sequential(nn.Conv3d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)),
    lambda: halves(normal(ROWS, 1, 3, 3, 3)),
)
add(
    "siamese",
    lambda: Calls(
        lambda net, a, b: net.head(torch.abs(net.trunk(a) - net.trunk(b))),
        trunk=nn.Linear(4, 6),
        head=nn.Linear(6, 3),
    ),
    lambda: halves((normal(ROWS, 4), normal(ROWS, 4) + 1.0)),
)
add(
    "transformer encoder padding",
    lambda: Calls(
        lambda net, x, mask: net.head(net.encoder(x, src_key_padding_mask=mask)[:, 0]),
        encoder=nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True), 1),
        head=nn.Linear(8, 3),
    ),
    lambda: halves((normal(ROWS, 5, 8), torch.arange(5).expand(ROWS, -1) > 3)),
)
add(
    "counts",
    lambda: mlp(1),
    lambda: halves(normal(ROWS, 4), CLASSES.float().unsqueeze(1)),
    likelihood="poisson",
    calibrator="noise",
)
add(
    "channels last images",
    lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    ).to(memory_format=torch.channels_last),
    lambda: halves(normal(ROWS, 2, 6, 6)),
)
