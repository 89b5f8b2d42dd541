"""Networks that users bring, each with data of its own: the class of a case, and the first cases of plain torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.stress.subjects import SUBJECTS
from torch import Tensor, nn

import flowbnn as fb
from structured_problems import make_structured

ROWS = 24  # examples of a case, in two batches
GENERATOR = torch.Generator()
CLASSES = torch.arange(ROWS) % 3


@dataclass(frozen=True)
class Case:
    """Network with its data, and what is expected of it.

    Args:
        make: Function that returns the network.
        data: Function that returns batches, or data of another format.
        likelihood: Likelihood of the targets.
        output: Selection of the outputs.
        rules: Rules of the noise.
        refusals: Kind of the error of each step that is refused.
        tolerance: Largest difference between predictions and single networks.
        double: True if the network is converted to double precision.
        calibrator: Candidate of the calibration. Refused calibrations are those by noise.
    """

    make: Callable[[], nn.Module]
    data: Callable[[], Any]
    likelihood: Any = "auto"
    output: Any = None
    rules: Mapping[Any, Any] = field(default_factory=lambda: {"*": fb.noise.NormalAffine(base_scale=0.1)})
    refusals: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = 1e-6
    double: bool = True
    calibrator: str = "temperature"


CASES: dict[str, Case] = {}


def normal(*shape: int) -> Tensor:
    """Returns random inputs that depend on their shape only."""
    return torch.randn(shape, generator=GENERATOR.manual_seed(len(shape)))


def words(*shape: int, vocabulary: int = 12) -> Tensor:
    """Returns random tokens."""
    return torch.randint(vocabulary, shape, generator=GENERATOR.manual_seed(7))


def halves(inputs: Any, targets: Any = None) -> list[tuple[Any, Any]]:
    """Returns two batches of the rows of tensors, tuples or dictionaries of tensors."""

    def cut(value: Any, rows: slice) -> Any:
        if isinstance(value, dict):
            return {name: cut(entry, rows) for name, entry in value.items()}
        if isinstance(value, tuple):
            return tuple(cut(entry, rows) for entry in value)
        return value[rows]

    targets = CLASSES if targets is None else targets
    half = slice(0, ROWS // 2), slice(ROWS // 2, ROWS)
    return [(cut(inputs, rows), cut(targets, rows)) for rows in half]


def add(name: str, make: Callable[[], nn.Module], data: Callable[[], Any], **options: Any) -> None:
    """Adds a case."""
    CASES[name] = Case(make, data, **options)


def add_subject(name: str, subject: str, **options: Any) -> None:
    """Adds a subject of the stress tests, with as many batches as the other cases have rows."""

    def data() -> Any:
        batches: list[Any] = []
        for _ in range(2):
            torch.manual_seed(len(batches))
            batches += SUBJECTS[subject](0)[1]
        return batches

    add(name, lambda: SUBJECTS[subject](0)[0], data, **options)


def add_structured(name: str, problem: str, **options: Any) -> None:
    """Adds a network with outputs for pixels, tokens or several labels."""
    add(name, lambda: make_structured(problem)[0], lambda: halves(*make_structured(problem)[1:]), **options)


def mlp(outputs: int = 3) -> nn.Sequential:
    """Returns a small network."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs))


# -------------------- 1 to 22 of the list

add_subject("resnet inplace relu", "resnet")
add_subject("convnext", "convnext")
add_structured("unet per pixel classes", "pixels")
add_structured("unet binary mask", "mask", likelihood="bernoulli")
add_structured("multilabel", "labels", likelihood="bernoulli", calibrator="noise")
add_subject("regression multi", "two_targets", calibrator="noise")
add(
    "regression squeezed",
    lambda: nn.Sequential(mlp(1), nn.Flatten(0)),
    lambda: halves(normal(ROWS, 4), normal(ROWS, 4).sum(1)),
    calibrator="noise",
)
add_subject("vit sdpa rmsnorm", "vision_transformer")
add_subject("tcn conv1d weightnorm", "weight_norm_tcn")
add_subject("old weight norm", "old_weight_norm")
add_subject("deepsets masked", "masked_sets")


def edges(nodes: int) -> Tensor:
    """Returns a ring of nodes."""
    index = torch.arange(nodes)
    return torch.stack([index, (index + 1) % nodes])


class NodeNetwork(nn.Module):
    """Graph network whose rows are nodes, with an edge list as second input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, edge_list: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return self.head(hidden.index_add(0, edge_list[1], hidden[edge_list[0]]))


add(
    "gnn node full graph",
    NodeNetwork,
    lambda: [((normal(ROWS, 4), edges(ROWS)), CLASSES), ((normal(ROWS, 4) + 0.1, edges(ROWS)), CLASSES)],
    refusals={"calibrate": "rows"},
)


class Translator(nn.Module):
    """Encoder and decoder of torch with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.transformer = nn.Transformer(8, 2, 1, 1, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1]).to(self.head.weight.dtype)
        hidden = self.transformer(self.embedding(source), self.embedding(target), tgt_mask=mask)
        return self.head(hidden[:, -1])


add("nn transformer full", Translator, lambda: halves((words(ROWS, 5), words(ROWS, 4))))
add_structured("tagger per token", "tokens")
add_subject("packed lstm lengths", "packed_lstm")


class PackedNetwork(nn.Module):
    """Recurrent network that takes packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4), nn.Linear(4, 3)

    def forward(self, sequences: Any) -> Tensor:
        return self.head(self.lstm(sequences)[1][0][0])


def packed() -> Any:
    x = normal(12, 5, 3)
    sequences = [x[index, : 2 + index % 3] for index in range(12)]
    packed = nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)
    return [(packed, CLASSES[:12]), (packed, CLASSES[:12])]


add("packed collate natural", PackedNetwork, packed, refusals={"calibrate": "rows"})
add_subject("rnncell loop", "recurrent_cell")
add_subject("bilinear", "bilinear")
add(
    "only bilinear",
    lambda: nn.Bilinear(4, 4, 3),
    lambda: halves((normal(ROWS, 4), normal(ROWS, 4))),
    refusals={"convert": "model"},
)


class ComplexNetwork(nn.Module):
    """Network with complex weights and the modulus of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 6, dtype=torch.complex64), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).abs())


add(
    "complex inputs",
    ComplexNetwork,
    lambda: halves(torch.complex(normal(ROWS, 4), normal(ROWS, 4))),
    double=False,
)
add_subject("moe top1 routing", "mixture_of_experts", refusals={"calibrate": "unsupported"})
add_subject("early exit", "early_exit", calibrator="noise")
