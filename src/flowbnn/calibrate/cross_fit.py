"""Cross-fitting: one network for each fold, trained on the other folds and calibrated on this fold."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from flowbnn.batches import pick
from flowbnn.calibrate.calibrate import calibrate
from flowbnn.data import TensorLoader
from flowbnn.data.formats import as_loader, columns_of
from flowbnn.diagnostics.fixed_data import read_fixed_data
from flowbnn.errors import describe_value, requirement_error, value_error
from flowbnn.methods.base import Method
from flowbnn.methods.calibrators.folds import split_folds
from flowbnn.methods.point import MAP
from flowbnn.networks import set_input_columns
from flowbnn.options import Count, Ge, Seed, call_factory, checked
from flowbnn.posterior.mixture import MixturePosterior
from flowbnn.posterior.weights import PointPosterior
from flowbnn.training.progress import terminal, track
from flowbnn.training.randomness import temporary_seed


@checked
def cross_calibrate(
    make_network: Callable[[], nn.Module],
    data: Any,
    *,
    folds: Annotated[int, Ge(2)] = 5,
    method: Method | None = None,
    batch_size: Count | None = None,
    options: Mapping[str, Any] | None = None,
    seed: Seed = 0,
    progress: bool = True,
    **calibration: Any,
) -> MixturePosterior:
    """Trains one network for each fold on the other folds, calibrates it on this fold, and returns the mixture of all networks.

    All data are used for training and for calibration, and no network is calibrated on its training data. The cost is that of a deep
    ensemble with one member for each fold.

    Args:
        make_network: Function that returns a new, untrained network.
        data: Loader of ``(inputs, targets)``, ``Dataset``, or pair of tensors or arrays. Every pass must give the same examples.
        folds: Number of folds.
        method: Method that trains a network. The default is ``MAP()``.
        batch_size: Number of examples in a batch of the training. The default is that of the loader, or 64.
        options: Options of the training, such as ``{"likelihood": "gaussian", "precision": "bf16-mixed"}``.
        seed: Seed of the folds, the networks and the fits.
        progress: If True, shows progress bars.
        calibration: Options of :func:`~flowbnn.calibrate`, such as ``candidates`` and ``samples``.

    Returns:
        The mixture. ``posterior.members`` has the calibrated network of each fold.

    Raises:
        FlowBNNError: If the method does not return a single network, or if there are fewer than ``2 * folds`` examples.

    >>> from flowbnn.models import MLP
    >>> generator = torch.Generator().manual_seed(0)
    >>> inputs = torch.randn(300, 2, generator=generator)
    >>> data = inputs, torch.bernoulli(inputs[:, 0].sigmoid(), generator=generator).long()
    >>> method, options = MAP(epochs=150, lr=0.02, prior_scale=10.0), {"candidates": ["temperature"], "progress": False}
    >>> posterior = cross_calibrate(lambda: MLP(2, (32,), 2), data, folds=3, method=method, **options)
    >>> len(posterior.members), posterior.predict(inputs).probabilities.shape
    (3, torch.Size([300, 2]))
    """
    if isinstance(make_network, nn.Module):  # callable as well
        value, hint = describe_value(make_network), "use lambda: Network()"
        raise value_error("make_network", "a function that returns a network", value, hint)
    data = as_loader(data, stage="train", argument="data")
    inputs, targets = read_fixed_data(data, seed, "cross-calibration")
    if len(targets) < 2 * folds:
        fields = {"kind": "examples", "argument": "folds"}
        need, number = f"at least {2 * folds} examples", len(targets)
        raise requirement_error(f"folds={folds}", need, number, "decrease folds", **fields)
    method = MAP() if method is None else method
    batch_size = batch_size or getattr(data, "batch_size", None) or 64
    training_options = {"seed": seed, "progress": progress, **(options or {})}
    if "accelerator" in training_options:
        calibration.setdefault("accelerator", training_options["accelerator"])
    members = []
    groups = split_folds(targets, folds, seed)
    for number, group in enumerate(track(groups, "cross-fitting", progress, "fold")):
        training_mask = torch.ones(len(targets), dtype=torch.bool)
        training_mask[group] = False
        with temporary_seed(seed * 1_000_003 + number):
            network = call_factory(make_network, name="make_network", kind=nn.Module)
        set_input_columns(network, columns_of(data))
        loader = _make_loader(inputs, targets, training_mask.nonzero()[:, 0], batch_size, seed + number)
        description = f"training of fold {number + 1}"
        point = method.fit(network, loader, **{"description": description, **training_options})
        if not isinstance(point, PointPosterior):
            fields = {"kind": "method", "argument": "method"}
            raise requirement_error("cross_calibrate", "a single network", method, "use fb.MAP()", **fields)
        MixturePosterior([point])  # refuses likelihoods without a mixture before the other folds are trained
        held_out = [(pick(inputs, group), targets[group])]
        arguments = {"likelihood": point.likelihood, "seed": seed, "progress": False, **calibration}
        members.append(calibrate(point.model, held_out, **arguments))
        if progress and (console := terminal()) is not None:
            console.print(f"fold {number + 1}: {members[-1].calibration}", highlight=False)
    return MixturePosterior(members)


def _make_loader(inputs: Any, targets: Tensor, index: Tensor, batch_size: int, seed: int) -> Any:
    """Returns a loader of some examples in random order."""
    if isinstance(inputs, Tensor):
        generator = torch.Generator().manual_seed(seed)
        return TensorLoader(
            inputs[index], targets[index], batch_size=batch_size, shuffle=True, generator=generator
        )
    order = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(seed))]
    return [(pick(inputs, rows), targets[rows]) for rows in order.split(batch_size)]
