r"""Active learning and Bayesian optimization: inputs of a pool to label next.

:func:`acquire` selects inputs by a score of their predictions. The mutual information of the labels and the network,

.. math:: I(y_1, \dots, y_n; w) = H(y_1, \dots, y_n) - \frac1S \sum_s H(y_1, \dots, y_n \mid w_s) ,

is the expected information of the labels. BALD ([Houlsby 2011](https://arxiv.org/abs/1112.5745)) sums it over single inputs.
BatchBALD ([Kirsch 2019](https://arxiv.org/abs/1906.08158)) computes it jointly, so that a batch has no duplicates.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from flowbnn.batches import call
from flowbnn.data.formats import as_inputs
from flowbnn.errors import FlowBNNError, check_shape, describe_value, requirement_error, value_error
from flowbnn.likelihoods.regression import RealLikelihood
from flowbnn.options import Count, SampleCount, checked
from flowbnn.posterior import Posterior
from flowbnn.predictive import ContinuousPredictive

AcquisitionScore = Literal["bald", "batchbald", "entropy", "margin", "variance", "thompson"]


class Selection(NamedTuple):
    """Inputs to label, and the information of their labels.

    Args:
        indices: Indices of the inputs in the pool, in the order of their selection.
        gains: Expected information of each label in addition to the previous labels, in nats.
    """

    indices: Tensor
    gains: Tensor


@checked
def acquire(
    posterior: Posterior,
    pool: Any,
    batch_size: Count = 10,
    score: AcquisitionScore = "batchbald",
    *,
    samples: SampleCount | None = None,
    configurations: Count = 1000,
    maximize: bool = True,
    seed: int = 0,
    **options: Any,
) -> Tensor:
    """Returns the indices of the inputs of a pool to label next, ``[batch_size]``, in the order of their selection.

    Args:
        posterior: Posterior of any method.
        pool: Inputs without labels: a tensor, array, loader or ``Dataset``. Labels are ignored.
        batch_size: Number of inputs to select.
        score: Score of inputs.

            * ``"batchbald"``: joint mutual information of all labels of the batch and the network (:func:`select_batchbald`). For real
              values it is that of a Gaussian process with the covariances of the sampled networks (:func:`select_logdet`).
            * ``"bald"``: mutual information of each label and the network.
            * ``"entropy"``: entropy of the predicted label, classes only.
            * ``"margin"``: smallest difference of the two largest probabilities, classes only.
            * ``"variance"``: predictive variance, real values only.
            * ``"thompson"``: largest value of one sampled network for each selected input (Thompson sampling), real values only.
        samples: Number of sampled networks. The default is that of the posterior, or ``batch_size`` for Thompson sampling.
        configurations: Largest number of label configurations in BatchBALD.
        maximize: If False, Thompson sampling looks for the smallest value.
        seed: Seed of the sampled networks and configurations.
        options: Other options of ``posterior.predict``.

    Raises:
        FlowBNNError: If the pool has fewer than ``batch_size`` inputs, or if the score does not support these predictions.

    >>> from flowbnn.likelihoods import Categorical
    >>> from flowbnn.posterior import PointPosterior
    >>> posterior = PointPosterior(torch.nn.Identity(), Categorical())
    >>> acquire(posterior, torch.tensor([[3.0, 0.0], [0.1, 0.0], [0.0, 1.0]]), 2, score="entropy")
    tensor([1, 2])
    """
    joint = score in ("batchbald", "thompson")
    samples = batch_size if score == "thompson" and samples is None else samples
    options = {"keep_samples": True if joint else "auto", **options}
    predictive = posterior.predict(as_inputs(pool, "pool", posterior.columns), samples, seed=seed, **options)
    if batch_size > len(predictive):
        raise value_error("batch_size", f"at most {len(predictive)} (the pool)", batch_size, kind="pool")
    has_classes = hasattr(predictive, "log_probabilities")
    if joint:
        _check_joint(predictive, score)
    if score == "thompson":
        return _thompson(predictive.samples[..., 0], batch_size, maximize)
    if score == "batchbald" and has_classes:
        return select_batchbald(
            predictive.samples, batch_size, configurations=configurations, seed=seed
        ).indices
    if score == "batchbald":
        return select_logdet(predictive.samples, predictive.sample_variances, batch_size).indices
    return acquisition_scores(predictive, score).topk(batch_size).indices


def acquisition_scores(predictive: Any, score: str) -> Tensor:
    """Returns the score of each input, ``[B]``. Labels of larger scores are more informative.

    Scores of several positions or targets are summed.

    Args:
        predictive: Predictive distribution.
        score: ``"bald"``, ``"entropy"``, ``"margin"`` or ``"variance"``.

    Raises:
        FlowBNNError: If the score does not support these predictions.

    >>> from flowbnn.predictive import CategoricalPredictive
    >>> predictive = CategoricalPredictive.from_probabilities(torch.tensor([[[0.5, 0.5], [0.9, 0.1]]]))
    >>> acquisition_scores(predictive, "margin")
    tensor([ 0.0000, -0.8000])
    """
    if hasattr(predictive, "log_probabilities"):
        if score == "margin":
            top = predictive.probabilities.topk(2, dim=-1).values
            values = top[..., 1] - top[..., 0]
        elif score in ("bald", "entropy"):
            values = predictive.entropy if score == "entropy" else predictive.mutual_information
        else:
            raise _unsupported(score, "real values", predictive)
    elif "epistemic" in predictive.uncertainties:
        if score not in ("bald", "variance"):
            raise _unsupported(score, "classes", predictive)
        ratio = predictive.epistemic / predictive.aleatoric
        values = predictive.variance if score == "variance" else 0.5 * torch.log1p(ratio)
    else:
        raise _unsupported(score, "classes or numbers", predictive)
    return values.reshape(len(values), -1).sum(-1)


@checked
def select_batchbald(
    probabilities: Tensor, batch_size: Count, *, configurations: Count = 1000, seed: int = 0
) -> Selection:
    r"""Selects a batch by greedy maximization of the joint mutual information of labels and network (BatchBALD).

    Given the labels :math:`c` of the inputs that are already selected, the gain of another input is

    .. math:: I(y; w \mid c) = E_c \, H\Big[ \sum_s \pi_s(c) \, p_s(y) \Big] - \frac1S \sum_s H[p_s(y)], \qquad
              \pi_s(c) \propto \prod_j p_s(c_j) .

    The expectation is exact as long as there are at most ``configurations`` label configurations. Otherwise configurations are
    sampled from their predictive distribution.

    Args:
        probabilities: Class probabilities of S samples for N inputs, ``[S, N, C]``.
        batch_size: Number of inputs to select.
        configurations: Largest number of label configurations.
        seed: Seed of sampled configurations.

    >>> probabilities = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.6, 0.4]], [[0.0, 1.0], [0.0, 1.0], [0.4, 0.6]]])
    >>> select_batchbald(probabilities, 3)  # the second label is known from the first
    Selection(indices=tensor([0, ...]), gains=tensor([0.6931, ...], dtype=torch.float64))
    """
    check_shape("probabilities", probabilities, ("samples >= 1", f"inputs >= {batch_size}", "classes >= 2"))
    p = probabilities.double()
    samples, _, classes = p.shape
    expected_entropy = _entropy(p).mean(0)
    generator = torch.Generator(p.device).manual_seed(seed)
    log_joint = p.new_zeros(1, samples)  # log-probability of each configuration under each sample
    weights, exhaustive = p.new_ones(1), True
    indices, gains = list[int](), list[float]()
    for _ in range(batch_size):
        gain = _conditional_entropy(p, log_joint.softmax(1), weights) - expected_entropy
        gain[indices] = -math.inf
        best = int(gain.argmax())
        indices.append(best)
        gains.append(max(0.0, float(gain[best])))
        exhaustive = exhaustive and len(log_joint) * classes <= configurations
        if exhaustive:
            log_joint = (log_joint.unsqueeze(1) + p[:, best].T.log()).flatten(0, 1)
            weights = log_joint.exp().mean(1)
            log_joint, weights = log_joint[weights > 0], weights[weights > 0]
        else:
            log_joint = _draw_configurations(p[:, indices], configurations, generator)
            weights = p.new_full((configurations,), 1.0 / configurations)
    return Selection(torch.tensor(indices, device=p.device), p.new_tensor(gains))


def _draw_configurations(p: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Returns the log-probabilities ``[number, S]`` of sampled labels of inputs ``[S, J, C]`` under each sample."""
    samples, inputs, _ = p.shape
    # every sample draws the same number of configurations, up to one
    sources = torch.arange(number, device=p.device) % samples
    labels = torch.multinomial(p[sources].flatten(0, 1), 1, generator=generator).view(number, inputs)
    log_joint = p.new_zeros(number, samples)
    for index in range(inputs):
        log_joint += p[:, index].log()[:, labels[:, index]].T
    return log_joint


def _conditional_entropy(p: Tensor, posterior_weights: Tensor, weights: Tensor) -> Tensor:
    """Returns the expected entropy of the label of each input, ``[N]``, if labels of other inputs are known.

    Args:
        p: Class probabilities ``[S, N, C]``.
        posterior_weights: Probability of each sample if a configuration is observed, ``[M, S]``.
        weights: Probability of each configuration, ``[M]``.
    """
    samples, _, classes = p.shape
    size = max(1, 2**24 // (len(weights) * classes))  # of numbers that are in memory at once
    entropies = []
    for chunk in p.split(size, 1):
        conditional = (posterior_weights @ chunk.reshape(samples, -1)).view(len(weights), -1, classes)
        entropies.append(weights @ _entropy(conditional))
    return torch.cat(entropies)


def _entropy(p: Tensor) -> Tensor:
    """Returns the entropy over the last axis."""
    return torch.special.entr(p).sum(-1)


@checked
def select_logdet(values: Tensor, noise_variances: Tensor, batch_size: Count) -> Selection:
    r"""Selects a batch by greedy maximization of the mutual information of a Gaussian process (BatchBALD for real values).

    .. math:: I(y_1, \dots, y_n; f) = \tfrac12 \log \det (1 + K \Sigma^{-1})

    :math:`K` has the covariances of the sampled values and :math:`\Sigma` the mean noise variances. The information of several
    targets is summed.

    Args:
        values: Values of S sampled networks, ``[S, N, D]``.
        noise_variances: Variances of the observation noise, ``[S, N, D]``.
        batch_size: Number of inputs to select.

    >>> values = torch.tensor([[[1.0], [1.0], [0.5]], [[-1.0], [-1.0], [0.5]], [[0.0], [0.0], [-1.0]]])
    >>> select_logdet(values, torch.full_like(values, 0.1), 2).indices  # the second input repeats the first
    tensor([0, 2])
    """
    check_shape("values", values, ("samples >= 1", f"inputs >= {batch_size}", "targets"))
    centered = (values - values.mean(0)).double() / math.sqrt(len(values))
    noise = noise_variances.double().mean(0)
    variances = centered.square().sum(0)  # [N, D], given the labels of the selected inputs
    factors = variances.new_zeros(batch_size, *variances.shape)  # rows of a Cholesky factor
    indices, gains = list[int](), list[float]()
    for step in range(batch_size):
        gain = 0.5 * torch.log1p(variances.clamp(min=0.0) / noise).sum(-1)
        gain[indices] = -math.inf
        best = int(gain.argmax())
        covariance = (centered * centered[:, best, None]).sum(0)
        covariance -= (factors * factors[:, best, None]).sum(0)
        factors[step] = covariance / (variances[best].clamp(min=0.0) + noise[best]).sqrt()
        variances = variances - factors[step].square()
        indices.append(best)
        gains.append(float(gain[best]))
    return Selection(torch.tensor(indices, device=values.device), variances.new_tensor(gains))


def _thompson(values: Tensor, batch_size: int, maximize: bool) -> Tensor:
    """Returns the best remaining input of each sampled network in turn, for values ``[S, N]``."""
    values = values.clone() if maximize else -values
    indices = list[int]()
    for number in range(batch_size):
        indices.append(int(values[number % len(values)].argmax()))
        values[:, indices[-1]] = -math.inf
    return torch.tensor(indices, device=values.device)


def _check_joint(predictive: Any, score: str) -> None:
    """Raises FlowBNNError if a score does not support the joint prediction of several inputs."""
    has_classes = hasattr(predictive, "log_probabilities")
    if score == "batchbald" and has_classes and predictive.samples.ndim > 3:
        raise _unsupported(score, "single labels", predictive, "use score='bald'")
    if not has_classes and not isinstance(predictive, ContinuousPredictive):
        raise _unsupported(score, "classes or numbers", predictive)
    if score == "thompson" and (has_classes or predictive.samples.shape[-1] != 1):
        raise _unsupported(score, "single real values", predictive)


def _unsupported(score: str, requirement: str, predictive: Any, hint: str = "") -> FlowBNNError:
    """Returns the error about predictions that a score does not support."""
    value = describe_value(predictive)
    return requirement_error(f"score='{score}'", requirement, value, hint, argument="score")


class FunctionPosterior:
    """Posterior of function values at some inputs, with the interface of a posterior of BoTorch.

    Args:
        values: Values of S sampled functions, ``[S, *batch, q, m]`` for q inputs and m outputs.

    >>> posterior = FunctionPosterior(torch.tensor([[[1.0]], [[3.0]]]))
    >>> posterior.mean, posterior.variance, posterior.rsample(torch.Size([5])).shape
    (tensor([[2.]]), tensor([[1.]]), torch.Size([5, 1, 1]))
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @property
    def mean(self) -> Tensor:
        """Mean ``[*batch, q, m]``."""
        return self.values.mean(0)

    @property
    def variance(self) -> Tensor:
        """Variance ``[*batch, q, m]`` of the functions, without observation noise."""
        return self.values.var(0, correction=0)

    @property
    def event_shape(self) -> torch.Size:
        """Shape of one joint draw, ``[*batch, q, m]``."""
        return self.values.shape[1:]

    @property
    def batch_range(self) -> tuple[int, int]:
        """Range of the batch axes of base samples."""
        return 0, -2

    @property
    def device(self) -> torch.device:
        """Device of the values."""
        return self.values.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the values."""
        return self.values.dtype

    def _extended_shape(self, sample_shape: torch.Size = torch.Size()) -> torch.Size:
        """Returns the shape of draws, as BoTorch's samplers ask for it."""
        return sample_shape + self.event_shape

    def rsample(self, sample_shape: torch.Size | None = None) -> Tensor:
        """Draws functions, ``[*sample_shape, *batch, q, m]``. Each draw is one function for all inputs.

        Gradients reach the inputs. The draws depend on torch's global generator.

        Args:
            sample_shape: Shape of the draws.
        """
        shape = torch.Size() if sample_shape is None else torch.Size(sample_shape)
        return self.rsample_from_base_samples(shape, torch.randint(len(self.values), shape))

    def rsample_from_base_samples(self, sample_shape: torch.Size, base_samples: Tensor) -> Tensor:
        """Returns the functions of given numbers.

        Args:
            sample_shape: Shape of the draws.
            base_samples: Numbers of the functions, from 0 to S - 1, in the shape of the draws.
        """
        functions = self.values[base_samples.reshape(-1).to(self.device)]
        return functions.reshape(self._extended_shape(sample_shape))


class FunctionModel:
    """Sampled functions of a regression posterior, with the interface of a model of BoTorch. It needs no BoTorch.

    Each function is a network of the posterior, followed by the mean of the likelihood. Gradients with respect to the inputs serve
    optimizers of acquisition functions.

    Args:
        posterior: Posterior of real values, of a method whose networks can be sampled.
        samples: Number of functions.
        seed: Seed of the functions.

    Raises:
        FlowBNNError: If the posterior predicts no real values, or if its networks cannot be sampled.

    >>> from flowbnn.likelihoods import Gaussian
    >>> from flowbnn.posterior import PointPosterior
    >>> model = FunctionModel(PointPosterior(torch.nn.Linear(3, 1), Gaussian(noise=0.1)), samples=4)
    >>> model.posterior(torch.zeros(7, 2, 3)).rsample(torch.Size([16])).shape  # 7 batches of 2 inputs
    torch.Size([16, 7, 2, 1])
    """

    @checked
    def __init__(self, posterior: Posterior, samples: SampleCount = 64, seed: int = 0) -> None:
        if not isinstance(posterior.likelihood, RealLikelihood):
            raise requirement_error(
                "FunctionModel", "real values", posterior.likelihood, argument="posterior"
            )
        self.likelihood = posterior.likelihood
        self.networks: list[nn.Module] = posterior.networks(samples, seed)

    @property
    def num_outputs(self) -> int:
        """Number of outputs m."""
        shape = self.likelihood.shape
        return 1 if shape is None else math.prod(shape)

    @property
    def batch_shape(self) -> torch.Size:
        """Empty shape, because the functions have no batch axes of their own."""
        return torch.Size()

    def posterior(self, X: Tensor, **options: Any) -> FunctionPosterior:
        """Returns the joint posterior of the function values at inputs.

        Args:
            X: Inputs ``[*batch, q, d]``.
            options: Options of BoTorch's models, of which ``posterior_transform`` is applied and the others are ignored.
        """
        rows = X.reshape(-1, X.shape[-1])
        values = torch.stack([self.likelihood.mean(call(network, rows)) for network in self.networks])
        result = FunctionPosterior(values.reshape(len(values), *X.shape[:-1], -1))
        transform = options.get("posterior_transform")
        return result if transform is None else transform(result)
