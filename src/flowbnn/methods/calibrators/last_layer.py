r"""Refit of the last layer to held-out data, with a penalty that is chosen by cross-validation.

.. math:: \hat W = \arg\min_W \; -\frac1N \sum_i \log p(y_i \mid W \phi(x_i)) + \frac{\lambda s^2}{2} \|W - W_0\|^2

with the features :math:`\phi` of the trained network, their mean square :math:`s^2`, and the trained weights or zero as :math:`W_0`.
The problem is convex for classes. All folds and penalties are fitted at once.
"""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from flowbnn.batches import call, device_of, dtype_of, move, split_batch
from flowbnn.data.formats import as_loader
from flowbnn.errors import FlowBNNError, describe_value, requirement_error
from flowbnn.flattening import flattening_of
from flowbnn.likelihoods import Bernoulli, Categorical, Likelihood, learns_noise
from flowbnn.methods.calibrators.base import Calibrator
from flowbnn.methods.calibrators.folds import split_folds
from flowbnn.methods.calibrators.label_problems import warn_contradiction, warn_unusable
from flowbnn.methods.calibrators.lbfgs import minimize_batch
from flowbnn.methods.data_summary import first_batch
from flowbnn.methods.laplace.layer_selection import channels_last, trace_layers
from flowbnn.networks import deepcopy_network, evaluation_mode
from flowbnn.options import Ge, Positive, check, checked, options
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.weights import PointPosterior
from flowbnn.regression import output_scale


@options(repr=False)
class LastLayerRefit(Calibrator):
    r"""Refit of the last linear layer of a trained network to held-out data. The network of the caller is not changed.

    The penalty :math:`\lambda` and its center are chosen by cross-validation. A large penalty towards the trained weights leaves the
    network as it is.

    Args:
        method: Method that is fitted first, whose posterior is a single network. None refits the network as it is.
        validation_fraction: Fraction of the training data that is held out if ``method`` is set and ``fit`` gets no validation data.
        samples: Number of samples, which a single network does not need.
        penalties: Values of :math:`\lambda` to choose from.
        center: Center of the penalty: the ``"trained"`` weights, ``"zero"``, or ``"auto"`` for the better one.
        folds: Number of folds of the cross-validation.

    >>> inputs, network = torch.randn(60, 2), nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> labels = torch.multinomial(network(inputs).softmax(-1), 1)[:, 0]
    >>> LastLayerRefit().fit(network, (inputs, labels), progress=False)
    PointPosterior(Sequential, Categorical(), 0 epochs)
    """

    penalties: Sequence[Positive] = field(default=(1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0), kw_only=True)
    center: Literal["auto", "trained", "zero"] = field(default="auto", kw_only=True)
    folds: Annotated[int, Ge(2)] = field(default=5, kw_only=True)

    @checked
    def calibrate(
        self, posterior: Posterior, held_out: Iterable[Any], *, seed: int = 0, progress: bool = True
    ) -> PointPosterior:
        """Returns the network with the refitted layer; see :meth:`Calibrator.calibrate`.

        A warning is raised if the labels contradict the predictions. If all targets are equal, or if there are fewer than 4, the
        network is returned as it is.
        """
        problem = LastLayerProblem.read(posterior, held_out)
        outputs = problem.network_outputs(problem.outputs(problem.weight[None])[0])
        predictive = posterior._predictive(outputs[None])
        if warn_unusable(predictive, problem.targets):
            return problem.posterior
        warn_contradiction(predictive, problem.targets)
        return self.fit_problem(problem, seed)

    def fit_problem(self, problem: "LastLayerProblem", seed: int = 0) -> PointPosterior:
        """Returns the network with the layer that has the best setting in a cross-validation.

        Args:
            problem: Features and targets, see :meth:`LastLayerProblem.read`.
            seed: Seed of the folds.
        """
        check("problem", problem, LastLayerProblem, "fit_problem")
        groups = split_folds(problem.targets, self.folds, seed)
        scores = self.score_folds(problem, groups)
        best = min(range(len(scores.settings)), key=lambda index: float(scores.nll[index].mean()))
        return self.refit(problem, scores, best)

    @property
    def settings(self) -> list["RefitSetting"]:
        """Penalties and centers to choose from, the largest penalty first."""
        centers = ("trained", "zero") if self.center == "auto" else (self.center,)
        return [
            RefitSetting(value, center)
            for center in centers
            for value in sorted(self.penalties, reverse=True)
        ]

    def score_folds(self, problem: "LastLayerProblem", groups: Sequence[Tensor]) -> "RefitScores":
        """Returns the held-out scores of all settings.

        Args:
            problem: Features and targets.
            groups: Indices of the examples of each fold.
        """
        settings, all_rows = self.settings, torch.arange(len(problem.targets))
        nll = problem.features.new_zeros(len(settings), len(all_rows))
        outputs = problem.features.new_zeros(len(settings), *problem.features.shape[:-1], len(problem.weight))
        is_training = torch.ones(len(groups), len(all_rows), dtype=torch.bool)
        for row, group in zip(is_training, groups, strict=True):
            row[group] = False
        pairs = [(all_rows[row], setting) for row in is_training for setting in settings]
        weights = problem.fit(pairs).unflatten(0, (len(groups), len(settings)))
        for group, fold_weights in zip(groups, weights, strict=True):
            index = group.to(nll.device)
            outputs[:, index] = problem.outputs(fold_weights, index)
            nll[:, index] = -problem.log_prob(outputs[:, index], index)
        return RefitScores(settings, nll, outputs)

    def refit(self, problem: "LastLayerProblem", scores: "RefitScores", best: int) -> PointPosterior:
        """Returns the network whose layer is fitted to all examples.

        Args:
            problem: Features and targets.
            scores: Scores of all settings.
            best: Index of the setting.
        """
        (weight,) = problem.fit([(torch.arange(len(problem.targets)), scores.settings[best])])
        return problem.make_posterior(weight, scores.outputs[best])


class RefitSetting(NamedTuple):
    """Penalty of a refit.

    Args:
        penalty: Factor of the penalty, relative to the mean square of the features.
        center: Center of the penalty, ``"trained"`` or ``"zero"``.
    """

    penalty: float
    center: str


class RefitScores(NamedTuple):
    """Held-out scores of a refit.

    Args:
        settings: Settings, of number K.
        nll: Negative log-likelihood of each example in the fold that was left out, ``[K, N]``.
        outputs: Outputs for each example in the fold that was left out, ``[K, N, C]``, or ``[K, N, T, C]`` for T positions.
    """

    settings: list[RefitSetting]
    nll: Tensor
    outputs: Tensor


@dataclass(frozen=True, eq=False)
class LastLayerProblem:
    """Features of held-out data before the last layer, and the layer.

    Args:
        posterior: Single network.
        layer: Name of its last layer.
        features: Features ``[N, F]`` in float64, with a column of ones if the layer has a bias. Positions, such as pixels, have an axis
            of their own, ``[N, T, F]``.
        targets: Targets.
        weight: Trained weights ``[C, F]``, with the bias as last column.
        likelihood: Observation model in float64.
        positions: Sizes of the axes of the positions.
        loc, scale: Location and scale ``[C]`` that bring the outputs of the layer to the units of the targets.
    """

    posterior: PointPosterior
    layer: str
    features: Tensor
    targets: Tensor
    weight: Tensor
    likelihood: Likelihood
    positions: tuple[int, ...]
    loc: Tensor
    scale: Tensor

    @classmethod
    def read(cls, posterior: Posterior, held_out: Iterable[Any]) -> "LastLayerProblem":
        """Computes the features of held-out data.

        Args:
            posterior: Posterior of a single network.
            held_out: Batches of ``(inputs, targets)``, or one pair.

        Raises:
            FlowBNNError: If the posterior is no single network, or if its output is not that of a linear layer or a 1x1 convolution.
        """
        if not isinstance(posterior, PointPosterior):
            raise _refusal("a single network", "network", describe_value(posterior))
        held_out = as_loader(held_out, stage="validation", columns=posterior.columns)
        model = posterior.model
        device, dtype = device_of(model), dtype_of(model)
        first = move(first_batch(held_out, "calibration")[0], device, dtype)
        has_classes = isinstance(posterior.likelihood, Categorical | Bernoulli)
        hint = "use fb.MatrixScaling" if has_classes else "use fb.Temperature"
        layer = trace_layers(model, first, "LastLayerRefit", hint).unscaled_output_layer
        if layer is None or flattening_of(model) is not None:
            raise _refusal("a final nn.Linear or 1x1 convolution", "layer", hint=hint)
        module: Any = model.get_submodule(layer)
        features, targets, positions = list[Tensor](), list[Tensor](), list[torch.Size]()

        def store(module: nn.Module, args: Any) -> None:
            values = channels_last(module, args[0].detach())
            positions.append(values.shape[1:-1])
            features.append((values.flatten(1, -2) if values.ndim > 2 else values).double())
            if values.ndim > 2 and sum(array.nbytes for array in features) > 2**30:
                raise _refusal(
                    "over 1 GiB of features", "memory", hint="pass fewer examples, or use fb.VectorScaling"
                )

        handle = module.register_forward_pre_hook(store)
        try:
            with evaluation_mode(model), torch.no_grad():
                for batch in held_out:
                    inputs, batch_targets = split_batch(batch)
                    call(model, move(inputs, device, dtype))
                    targets.append(posterior.likelihood.canonical_targets(batch_targets).to(device))
        finally:
            handle.remove()
        columns, weight = [torch.cat(features)], [module.weight.detach().double().flatten(1)]
        if module.bias is not None:
            columns.append(torch.ones_like(columns[0][..., :1]))
            weight.append(module.bias.detach().double()[:, None])
        likelihood = deepcopy(posterior.likelihood).double().requires_grad_(False)
        parts = torch.cat(columns, -1), torch.cat(targets), torch.cat(weight, 1)
        units = [values.to(device) for values in output_scale(model, len(module.weight))]
        return cls(posterior, layer, *parts, likelihood, tuple(positions[0]), *units)

    def outputs(self, weights: Tensor, index: Tensor | None = None) -> Tensor:
        """Returns the outputs ``[P, N, C]`` or ``[P, N, T, C]`` of weights ``[P, C, F]`` for some examples, or for all."""
        features = self.features if index is None else self.features[index]
        return self.loc + self.scale * (features @ (weights.mT[:, None] if self.positions else weights.mT))

    def network_outputs(self, outputs: Tensor) -> Tensor:
        """Returns outputs ``[N, C]`` or ``[N, T, C]`` in the layout of the network."""
        if not self.positions:
            return outputs
        values = outputs.unflatten(1, self.positions)
        module = self.posterior.model.get_submodule(self.layer)
        return values if isinstance(module, nn.Linear) else values.movedim(-1, 1)

    def log_prob(self, outputs: Tensor, index: Tensor) -> Tensor:
        """Returns log-likelihoods ``[P, N]`` of outputs ``[P, N, C]`` or ``[P, N, T, C]`` for some examples."""
        targets = self.targets[index]
        repeated = targets.expand(len(outputs), *targets.shape).flatten(0, 1)
        values = self.network_outputs(outputs.flatten(0, 1))
        return self.likelihood.log_prob(values, repeated).reshape(outputs.shape[:2])

    def fit(self, problems: Sequence[tuple[Tensor, RefitSetting]]) -> Tensor:
        """Returns the weights ``[P, C, F]`` of several problems, each with its examples and its setting.

        Args:
            problems: Indices of the examples and setting of each problem.
        """
        # the outputs of the problems that are fitted at once take 32 MiB in float64
        group = max(1, 2**22 // (self.features[..., 0].numel() * len(self.weight)))
        chunks = [problems[start : start + group] for start in range(0, len(problems), group)]
        return torch.cat([self._fit_group(chunk) for chunk in chunks])

    def _fit_group(self, problems: Sequence[tuple[Tensor, RefitSetting]]) -> Tensor:
        """Returns the weights of several problems, which are fitted at once."""
        count, all_rows = len(problems), torch.arange(len(self.targets), device=self.features.device)
        mask = self.features.new_zeros(count, len(self.targets))
        for row, (subset, _) in zip(mask, problems, strict=True):
            row[subset.to(row.device)] = 1.0
        mask /= mask.sum(1, keepdim=True)
        square = float(self.features.square().mean())
        penalties = self.features.new_tensor([square * setting.penalty for _, setting in problems])
        trained = self.features.new_tensor([setting.center == "trained" for _, setting in problems])
        centers = trained[:, None] * self.weight.flatten()

        def objective(x: Tensor, rows: Tensor) -> Tensor:
            outputs = self.outputs(x.reshape(-1, *self.weight.shape))
            nll = -(self.log_prob(outputs, all_rows) * mask[rows]).sum(1)
            return nll + 0.5 * penalties[rows] * (x - centers[rows]).square().sum(1)

        start = self.weight.flatten().expand(count, -1).clone()
        # a derivative of the mean NLL below 1e-5 does not change a prediction visibly
        weights = minimize_batch(objective, start, max_iterations=150, tolerance=1e-5)
        return weights.reshape(count, *self.weight.shape)

    @torch.no_grad()
    def make_posterior(self, weight: Tensor, held_out_outputs: Tensor) -> PointPosterior:
        """Returns a copy of the network with other weights of the last layer.

        Args:
            weight: Weights ``[C, F]``, with the bias as last column.
            held_out_outputs: Outputs for examples that were left out, ``[N, C]``. A learned noise scale is fitted to them.
        """
        model, likelihood = deepcopy_network(self.posterior.model), deepcopy(self.posterior.likelihood)
        module: Any = model.get_submodule(self.layer)
        columns = module.weight.shape[1]
        module.weight.copy_(weight[:, :columns].reshape(module.weight.shape))
        if module.bias is not None:
            module.bias.copy_(weight[:, columns])
        if learns_noise(likelihood):
            residuals = held_out_outputs - self.targets.reshape(held_out_outputs.shape)
            likelihood.log_scale.copy_(0.5 * residuals.square().mean(0).clamp(min=1e-24).log())
        return PointPosterior(model, likelihood, self.posterior.history)


def _refusal(
    requirement: str, kind: str, value: str | None = None, hint: str = "use fb.MatrixScaling"
) -> FlowBNNError:
    """Returns the error for a network whose last layer cannot be fitted again."""
    return requirement_error("LastLayerRefit", requirement, value, hint, kind=kind, argument="network")
