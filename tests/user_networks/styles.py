"""Networks with inputs and outputs of other forms, and code of other styles: buffers, hooks, parametrizations, wrappers."""

from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tests.stress.subjects import Calls
from tests.user_networks.cases import CLASSES, ROWS, add, halves, mlp, normal, words
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal
from torch.utils.checkpoint import checkpoint_sequential
from transformers.utils import ModelOutput

import flowbnn as fb

# -------------------- inputs and outputs of other forms


class Record(NamedTuple):
    """Inputs with names."""

    left: Tensor
    right: Tensor


@dataclass
class Output(ModelOutput):
    """Outputs of a model of transformers, with a loss that is missing."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


Detections = namedtuple("Detections", ["boxes", "labels"])


class Detector(nn.Module):
    """Boxes and classes as a dictionary, with losses in training mode only."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.trunk, self.boxes, self.labels = nn.Conv2d(2, 4, 3), nn.Linear(4, 4), nn.Linear(4, 3)
        self.kind = kind

    def forward(self, images: Tensor) -> Any:
        x = self.trunk(images).relu().mean((2, 3))
        boxes, labels = self.boxes(x).sigmoid(), self.labels(x)
        if self.kind == "named":
            return Detections(boxes, labels)
        if self.kind == "hugging face":
            return Output(logits=labels, hidden_states=(x,))
        return {"boxes": boxes, "labels": labels, "aux": {"features": x}}


class RecordNetwork(nn.Module):
    """Network that takes a named tuple, by two arguments or as one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, record: Record) -> Tensor:
        return self.layer(record.left - record.right)


class Nested(nn.Module):
    """Network that takes nested dictionaries with lists."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(4, 3), nn.Embedding(12, 3)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        return self.layer(sum(batch["views"])) + self.table(batch["meta"]["word"])


class Flags(nn.Module):
    """Network with flags and None among its keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(
        self, x: Tensor, *, mask: Tensor | None, normalize: bool, **extra: Any
    ) -> tuple[Tensor, dict]:
        x = F.normalize(x, dim=1) if normalize else x
        x = x if mask is None else x * mask
        return self.layer(x), extra


def views() -> list[Any]:
    batches = halves((normal(ROWS, 4), normal(ROWS, 4) + 1, words(ROWS)))
    return [({"views": [a, b], "meta": {"word": w}}, y) for (a, b, w), y in batches]


BOXES = torch.rand(ROWS, 4, generator=torch.Generator().manual_seed(1))
HEADS = fb.likelihoods.Heads({"boxes": fb.likelihoods.Gaussian(dim=4), "labels": "categorical"})
add(
    "detector dictionary",
    lambda: Detector("dictionary"),
    lambda: halves(normal(ROWS, 2, 6, 6), {"boxes": BOXES, "labels": CLASSES}),
    likelihood=HEADS,
    calibrator="noise",
)
add(
    "detector named tuple",
    lambda: Detector("named"),
    lambda: halves(normal(ROWS, 2, 6, 6)),
    output="labels",
)
add("model output", lambda: Detector("hugging face"), lambda: halves(normal(ROWS, 2, 6, 6)))
add(
    "named tuple inputs",
    RecordNetwork,
    lambda: [(Record(*x), y) for x, y in halves((normal(ROWS, 4), normal(ROWS, 4) + 1))],
)
add("nested dictionaries and lists", Nested, views)
add(
    "flags and none",
    Flags,
    lambda: [({"x": x, "mask": None, "normalize": True}, y) for x, y in halves(normal(ROWS, 4))],
)

# -------------------- code of other styles


class Running(nn.Module):
    """Statistics that the forward pass updates, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.layer = mlp()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.get_buffer("mean") + 0.1 * x.detach().mean(0)
            self.steps += 1
        return self.layer(x - self.mean)


class Positive(nn.Module):
    """Parametrization by positive weights."""

    def forward(self, weight: Tensor) -> Tensor:
        return F.softplus(weight)


class OwnLinear(nn.Linear):
    """Linear layer with standardized weights."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(1, keepdim=True)
        return F.linear(input, weight, self.bias)


class OwnConv(nn.Conv2d):
    """Convolution with padding as TensorFlow does it, which depends on the input (timm)."""

    def forward(self, input: Tensor) -> Tensor:
        height, width = input.shape[-2:]
        return self._conv_forward(F.pad(input, [width % 2, 1, height % 2, 1]), self.weight, self.bias)


class Quantizable(nn.Module):
    """Network with stubs of quantization."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.body, self.dequant = (
            torch.ao.quantization.QuantStub(),
            mlp(),
            torch.ao.quantization.DeQuantStub(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.body(self.quant(x)))


class StochasticDepth(nn.Module):
    """Blocks that are skipped at random in training."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or torch.rand(()) > 0.2:
                x = x + torch.tanh(block(x))
        return self.head(x)


def positive() -> nn.Module:
    network = mlp()
    parametrize.register_parametrization(network[2], "weight", Positive())
    return network


def hooked() -> nn.Module:
    network = mlp()
    network[0].register_forward_hook(lambda module, args, output: output * 2.0)
    network[2].register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
    return network


add("running statistics", Running, lambda: halves(normal(ROWS, 4)))
add("positive weights", positive, lambda: halves(normal(ROWS, 4)))
add(
    "orthogonal weights",
    lambda: nn.Sequential(orthogonal(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 3)),
    lambda: halves(normal(ROWS, 4)),
)
add(
    "spectral norm convolution",
    lambda: nn.Sequential(nn.utils.spectral_norm(nn.Conv2d(2, 3, 3)), nn.Flatten(), nn.Linear(48, 3)),
    lambda: halves(normal(ROWS, 2, 6, 6)),
)
add(
    "own layers",
    lambda: nn.Sequential(OwnConv(2, 3, 3), nn.GELU(), nn.Flatten(), OwnLinear(75, 3)),
    lambda: halves(normal(ROWS, 2, 6, 6)),
)
add("quantization stubs", Quantizable, lambda: halves(normal(ROWS, 4)))
add("stochastic depth", StochasticDepth, lambda: halves(normal(ROWS, 4)))
add("user hooks", hooked, lambda: halves(normal(ROWS, 4)))
add(
    "scripted part",
    lambda: nn.Sequential(
        nn.Linear(4, 6), torch.jit.script(nn.Sequential(nn.ReLU(), nn.Linear(6, 6))), nn.Linear(6, 3)
    ),
    lambda: halves(normal(ROWS, 4)),
    refusals={"convert": "network"},
    double=False,
)
add(
    "compiled part",
    lambda: nn.Sequential(nn.Linear(4, 6), torch.compile(nn.ReLU(), backend="eager"), nn.Linear(6, 3)),
    lambda: halves(normal(ROWS, 4)),
)
add(
    "checkpointed blocks",
    lambda: Calls(
        lambda net, x: net.head(checkpoint_sequential(net.body, 2, x, use_reentrant=True)),
        body=mlp(6),
        head=nn.Linear(6, 3),
    ),
    lambda: halves(normal(ROWS, 4)),
)
add(
    "one shared layer",
    lambda: Calls(
        lambda net, x: net.head(net.block(torch.tanh(net.block(x)))),
        block=nn.Linear(4, 4),
        head=nn.Linear(4, 3),
    ),
    lambda: halves(normal(ROWS, 4)),
)
add(
    "half of a split",
    lambda: Calls(
        lambda net, x: net.head(torch.cat([net.a(x[:, :2]), x[:, 2:].flip(1)], 1)),
        a=nn.Linear(2, 4),
        head=nn.Linear(6, 3),
    ),
    lambda: halves(normal(ROWS, 4)),
)


class InPlace(nn.Module):
    """Network that changes its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp()

    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = 0.0
        x *= 0.5
        return self.layer(x)


class StoredFeatures(nn.Module):
    """Network that stores what it has computed, for a plot."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.features: Any = None
        self.maps: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.features = torch.relu(self.first(x))
        self.maps = [self.features.mean(0)]
        return self.head(self.features)


class Tasks(nn.Module):
    """Heads for several tasks, of which the batch names one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(4, 6), nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        return self.heads[int(task)](torch.relu(self.body(x)))


add("in-place inputs", InPlace, lambda: halves(normal(ROWS, 4)))
add("stored features", StoredFeatures, lambda: halves(normal(ROWS, 4)))
add(
    "task of a batch",
    Tasks,
    lambda: [((x, torch.tensor(task)), y) for task, (x, y) in enumerate(halves(normal(ROWS, 4)))],
)
