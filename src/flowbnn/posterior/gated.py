r"""Density gate: a posterior whose predictions fall back to a fixed distribution for unfamiliar inputs.

A flow is fitted to the inputs, or to features of them. An input is unfamiliar if its log-density is below the ``false_alarm`` quantile
of the log-densities of held-out rows. Its prediction is then the marginal distribution of the targets: class frequencies, or a Gaussian
with the mean and the standard deviation of the targets. Predictions of other inputs do not change.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from flowbnn.batches import require_targets, split_weighted_batch, take
from flowbnn.data.formats import as_loader
from flowbnn.density import Density, NoveltyDetector, fit_density
from flowbnn.density.features import Features
from flowbnn.errors import check_shape, requirement_error, value_error
from flowbnn.flows import named_flows
from flowbnn.likelihoods import Heads, RealLikelihood
from flowbnn.metrics.checks import check_classes
from flowbnn.networks import copy_network
from flowbnn.options import Count, Probability, Seed, check, checked
from flowbnn.posterior.base import Posterior, Prediction
from flowbnn.posterior.files import check_shapes
from flowbnn.posterior.prediction import PredictOptions
from flowbnn.posterior.wrapper import WrappedPosterior
from flowbnn.predictive import ContinuousPredictive
from flowbnn.regression import TargetStatistics, noise_at_mean
from flowbnn.training.randomness import preserve_rng_state, temporary_seed

FlowName = Literal["nsf", "maf", "realnvp"]


class DensityGate(nn.Module):
    """Density of the features of familiar inputs, with the threshold below which an input is unfamiliar.

    Args:
        features: Function from inputs to features.
        density: Density of the features.
        held_out_scores: Log-densities of held-out familiar inputs, ``[N]``.
        fallback: Class probabilities ``[C]``, or mean and variance of each target, ``[2, D]``.
        false_alarm: Share of familiar inputs that are called unfamiliar.
        flow: Name of the flow.
    """

    held_out_scores: Tensor
    fallback: Tensor

    def __init__(
        self,
        features: Features,
        density: Density,
        held_out_scores: Tensor,
        fallback: Tensor,
        false_alarm: float,
        flow: str,
    ) -> None:
        super().__init__()
        self.features, self.density = features, density
        self.false_alarm, self.flow = false_alarm, flow
        self.register_buffer("held_out_scores", held_out_scores)
        self.register_buffer("fallback", fallback)

    @property
    def detector(self) -> NoveltyDetector:
        """Detector of unfamiliar features."""
        return NoveltyDetector(self.density, self.false_alarm, "density", self.held_out_scores)

    def scores(self, inputs: Any, network: nn.Module) -> Tensor:
        """Returns the log-density of the features of each input, ``[B]``.

        Args:
            inputs: Inputs of the network.
            network: Network of the posterior.
        """
        features = self.features(inputs, network, partial(noise_at_mean, network))
        return self.density.score(features)

    def is_unfamiliar(self, scores: Tensor) -> Tensor:
        """Returns True for each log-density below the ``false_alarm`` quantile of the log-densities of held-out rows."""
        return self.detector.p_value_of(scores.cpu()) <= self.false_alarm

    def settings(self) -> dict[str, Any]:
        """Returns everything except the tensors as plain values."""
        dim: Any = self.density.flow.dim
        return {
            "layer": self.features.layer,
            "flow": self.flow,
            "dim": int(dim),
            "false_alarm": self.false_alarm,
            "shapes": {name: list(value.shape) for name, value in self.named_buffers() if not _of_flow(name)},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> "DensityGate":
        """Returns the gate of a file.

        Args:
            state: Tensors of its ``state_dict``.
            settings: Result of :meth:`settings`.
        """
        buffers = {name: value for name, value in state.items() if not _of_flow(name)}
        check_shapes(buffers, settings["shapes"])
        features = Features(settings["layer"], state.get("features.center"), state.get("features.directions"))
        flow = named_flows()[settings["flow"]](int(settings["dim"]))
        density = Density(flow, state.get("density.loc"), state.get("density.scale"))
        gate = cls(
            features,
            density,
            state["held_out_scores"],
            state["fallback"],
            float(settings["false_alarm"]),
            settings["flow"],
        )
        gate.load_state_dict(dict(state))
        return gate.eval()


def _of_flow(name: str) -> bool:
    """Returns True for the name of a tensor of the flow."""
    return name.startswith("density.flow.")


class GatedPosterior(WrappedPosterior):
    """Posterior with a density gate, from :func:`gated`.

    ``predict`` returns the prediction of the inner posterior for familiar inputs, and the fallback for unfamiliar ones. Its attribute
    ``log_density`` has the log-density of the features of each input. All other methods are those of the inner posterior.

    Args:
        posterior: Inner posterior, of any method.
        gate: Density gate.
    """

    kind: ClassVar[str] = "gated"

    def __init__(self, posterior: Posterior, gate: DensityGate) -> None:
        super().__init__(posterior)
        self.gate = gate

    def __repr__(self) -> str:
        return f"GatedPosterior({self.posterior!r}, false_alarm={self.gate.false_alarm:g})"

    def _finish_batch(self, inputs: Any, outputs: Tensor, prediction: Prediction) -> Tensor:
        """Returns outputs with the log-densities of the inputs as a further column, so that both are collected together."""
        outputs = self.posterior._finish_batch(inputs, outputs, prediction)
        outputs = outputs.unsqueeze(-1) if outputs.ndim == 2 else outputs
        axes = ("samples", "batch", "outputs")
        check_shape("outputs", outputs, axes, kind="outputs", owner="fb.gated", argument="posterior")
        scores = self._scores(inputs, prediction).to(outputs)
        lowest = torch.finfo(outputs.dtype).min
        scores = scores.nan_to_num(lowest).clamp_min(lowest).expand(len(outputs), -1)
        return torch.cat([outputs, scores.unsqueeze(-1)], -1)

    def _scores(self, inputs: Any, prediction: Prediction) -> Tensor:
        """Returns the log-density of each input. The hook of a layer is on a clone, because other threads may use the network."""
        network = prediction.model if self.gate.features.layer is None else prediction.clone
        return self.gate.scores(inputs, network)

    def _round_predictive(self, outputs: Tensor) -> Any:
        return self.posterior._round_predictive(outputs)

    def _predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> Any:
        predictive = self.posterior._predictive(outputs[..., :-1], sample_counts)
        scores = outputs[0, :, -1]
        predictive.log_density = scores
        return predictive.with_fallback(self.gate.is_unfamiliar(scores), self.gate.fallback)

    @checked
    def is_unfamiliar(self, inputs: Any) -> Tensor:
        """Returns True for each input that the gate calls unfamiliar, ``[B]``.

        Args:
            inputs: Inputs of the network.
        """
        with Prediction(self.model, PredictOptions(), self.default_samples, self.cache) as prediction:
            return self.gate.is_unfamiliar(self._scores(inputs, prediction))

    def networks(self, samples: int, seed: int | None = None) -> list[nn.Module]:
        """Returns networks of the inner posterior, without the gate."""
        return self.posterior.networks(samples, seed)

    def settings(self) -> dict[str, Any]:
        return self.gate.settings()

    def state(self) -> dict[str, Tensor]:
        return self.gate.state_dict()

    @classmethod
    def from_inner(
        cls, posterior: Posterior, state: dict[str, Tensor], settings: dict[str, Any]
    ) -> "GatedPosterior":
        """Returns the posterior of a file, see :meth:`WrappedPosterior.from_inner`. Densities are computed on the CPU."""
        tensors = {name: value.cpu() for name, value in state.items()}
        return cls(posterior, DensityGate.from_state(tensors, settings))


def check_without_gate(posterior: Any) -> None:
    """Raises FlowBNNError if a posterior has a density gate, whose fallback must not be calibrated or mixed."""
    if isinstance(posterior, GatedPosterior):
        value, hint = "a gated posterior", "use posterior.posterior and call fb.gated last"
        raise value_error("posterior", "without a density gate", value, hint, kind="unsupported")


@checked
def gated(
    posterior: Posterior,
    loader: Any,
    features: str | None = None,
    false_alarm: Probability = 0.05,
    *,
    components: Count = 16,
    flow: FlowName = "nsf",
    held_out_fraction: Probability = 0.2,
    epochs: Count = 100,
    seed: Seed = 0,
    progress: bool = False,
) -> GatedPosterior:
    r"""Adds a density gate to a posterior: predictions fall back to a fixed distribution for unfamiliar inputs.

    Far from the data most networks are confident. A flow :math:`p(h)` over the inputs, or over features :math:`h` of the network,
    detects such inputs. The fallback is the frequency of the classes, or a Gaussian with the mean and the standard deviation of the
    targets. At most a share ``false_alarm`` of familiar inputs also gets the fallback. The threshold is set on rows of the loader that
    the flow is not fitted to, so that this bound holds for any flow (:class:`~flowbnn.density.NoveltyDetector`).

    Args:
        posterior: Posterior of any method.
        loader: Loader of ``(inputs, targets)``, ``Dataset``, or pair of tensors or arrays. With features of a layer, use data that the
            network was not trained on, because its features of training data differ.
        features: Name of the layer whose outputs are the features. None uses the inputs.
        false_alarm: Share of familiar inputs that are called unfamiliar.
        components: Largest number of features. Wider features are reduced to this number of principal components, and the distance to
            their plane is added.
        flow: Name of the flow, ``"nsf"``, ``"maf"`` or ``"realnvp"``.
        held_out_fraction: Fraction of the rows that sets the threshold.
        epochs: Largest number of epochs of the fit of the flow.
        seed: Seed of the split and of the fit.
        progress: If True, a progress bar is shown on a terminal.

    Returns:
        A posterior whose predictions have ``log_density``. ``posterior.gate`` is the gate.

    Raises:
        FlowBNNError: If the loader has no targets or several labels for an input, or if the network has no such layer.

    >>> from flowbnn.likelihoods import Categorical
    >>> from flowbnn.posterior import PointPosterior
    >>> inputs = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    >>> posterior = PointPosterior(nn.Linear(2, 3), Categorical())
    >>> safe = gated(posterior, (inputs, torch.arange(200) % 4 % 3), epochs=2)
    >>> safe.predict(torch.full((1, 2), 100.0)).probabilities  # class frequencies
    tensor([[0.4975, 0.2512, 0.2512]])
    """
    if isinstance(posterior.likelihood, Heads):
        value, hint = posterior.likelihood, "fit a posterior per head"
        raise requirement_error("fb.gated", "one head", value, hint, argument="posterior")
    loader = as_loader(loader, columns=posterior.columns)
    check("loader", loader, Iterable, "gated")
    network = copy_network(posterior.model).eval()
    context = partial(noise_at_mean, network)
    # temporary_seed holds the lock of torch's global generator, which loaders, initial weights and the fit use;
    # predict must stay outside
    with temporary_seed(seed), preserve_rng_state(loader, seed):
        extractor = Features.fit(loader, components, features, network, context)
    feature_batches, target_batches = [], []
    with temporary_seed(seed), preserve_rng_state(loader, seed):
        for batch in loader:
            inputs, targets, _ = split_weighted_batch(batch)
            feature_batches.append(extractor(inputs, network, context))
            target_batches.append(require_targets(targets))
    feature_rows = torch.cat(feature_batches)
    order = torch.randperm(len(feature_rows), generator=torch.Generator().manual_seed(seed))
    num_held_out = max(1, round(held_out_fraction * len(feature_rows)))
    if len(feature_rows) - num_held_out < 2:
        raise requirement_error(
            "fb.gated", "at least 3 rows", len(feature_rows), kind="data", argument="loader"
        )
    fallback = _fallback(posterior, target_batches, inputs)
    with temporary_seed(seed):
        model = named_flows()[flow](feature_rows.shape[1])
        density = fit_density(
            model, feature_rows[order[num_held_out:]], epochs=epochs, seed=seed, progress=progress
        )
    detector = density.novelty(feature_rows[order[:num_held_out]], rate=false_alarm)
    return GatedPosterior(
        posterior, DensityGate(extractor, density, detector.held_out_scores, fallback, false_alarm, flow)
    )


def _add_counts(counts: Tensor, labels: Tensor) -> Tensor:
    """Adds the numbers of labels ``[B]``, or the sums of soft labels ``[B, C]``, to counts."""
    is_soft = labels.is_floating_point()
    if labels.ndim != (2 if is_soft else 1):
        fields = {"kind": "targets", "argument": "loader"}
        hint = "detect unfamiliar inputs by fb.fit_density(flow, features).novelty(held_out)"
        value = f"shape {tuple(labels.shape)}"
        raise requirement_error("fb.gated", "one label for each input", value, hint, **fields)
    batch_counts = labels.double().sum(0) if is_soft else torch.bincount(labels).double()
    size = max(len(counts), len(batch_counts))
    total = torch.zeros(size, dtype=torch.float64)
    total[: len(counts)] += counts
    total[: len(batch_counts)] += batch_counts
    return total


def _fallback(posterior: Posterior, target_batches: list[Any], inputs: Any) -> Tensor:
    """Returns class frequencies with one more example of each class, or the mean and the variance of each target.

    Args:
        posterior: Posterior whose predictions show the kind of the targets.
        target_batches: Targets of all examples.
        inputs: Inputs of a batch.
    """
    likelihood = posterior.likelihood
    if isinstance(likelihood, RealLikelihood):
        return _mean_and_variance(map(likelihood.link, target_batches))
    predictive = posterior.predict(take(inputs, 0, 1), 1, seed=0, progress=False)
    if isinstance(predictive, ContinuousPredictive):  # user-defined likelihood of real values
        return _mean_and_variance(target_batches)
    counts = torch.zeros(0)
    for targets in target_batches:
        counts = _add_counts(counts, likelihood.canonical_targets(targets).cpu())
    classes = predictive.probabilities.shape[-1]
    check_classes(torch.arange(len(counts)), (len(counts),), classes)
    frequencies = torch.ones(classes, dtype=torch.float64)
    frequencies[: len(counts)] += counts
    return (frequencies / frequencies.sum()).float()


def _mean_and_variance(target_batches: Iterable[Tensor]) -> Tensor:
    """Returns the mean and the variance of each target, ``[2, D]``."""
    statistics = TargetStatistics()
    for targets in target_batches:
        statistics.add(targets)
    return torch.stack([statistics.mean, statistics.variance]).float()
