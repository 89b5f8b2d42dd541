r"""Laplace approximation (MacKay 1992; Ritter et al. 2018; Daxberger et al., 2106.14806): a Gaussian around the trained network.

.. math:: q(w) = \mathcal N(\hat w, (H + \delta I)^{-1}), \qquad H = \sum_i J_i^T \Lambda_i J_i

with the Jacobian :math:`J_i` of the outputs at the trained weights :math:`\hat w`, the likelihood's curvature :math:`\Lambda_i` in the
outputs, and the prior precision :math:`\delta`, by default the one at which the marginal likelihood of the training data is highest.
The network is differentiated in evaluation mode, with the running statistics of its BatchNorm layers.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import field
from typing import Annotated, Any, Literal

import torch
from torch import nn

from flowbnn.likelihoods import Gaussian
from flowbnn.methods.base import FitOptions, LikelihoodName, Method, register_method
from flowbnn.methods.fitting import learn_noise, prepare
from flowbnn.methods.laplace.curvature import Curvature, is_direct, measure
from flowbnn.methods.laplace.layers import choose_layers, survey, without_nested
from flowbnn.methods.laplace.memory import bytes_needed, check_memory
from flowbnn.methods.laplace.newton import newton_step
from flowbnn.methods.laplace.output_hessian import check_likelihood
from flowbnn.methods.laplace.posterior import LaplacePosterior, PredictiveName
from flowbnn.methods.laplace.prior import with_prior
from flowbnn.options import Ge, NonNegative, Positive, options, takes
from flowbnn.posterior.forward import device_of
from flowbnn.posterior.point import PointPosterior
from flowbnn.training import is_main_process, track

__all__ = ["Laplace"]


@register_method
@options(repr=False)
class Laplace(Method):
    r"""A Gaussian around the trained weights, from the curvature of the loss.

    ``epochs=0`` takes the network as it is trained, and then costs little more than one pass over the data for the last layer.

    Args:
        structure: of the covariance: ``"kron"``, a Kronecker product for each layer, its bias included; ``"diag"``; ``"full"``.
            Kronecker factors serve Linear and Conv1d, 2d, 3d layers; the scales and shifts of normalization layers then stay as they
            are trained, while "diag" and "full" cover them. "diag" and "full" take any layer, tied weights included.
        layers: ``"last"``, the layer with weights that is called last; ``"all"``; or a glob of their names. What is frozen stays out.
        prior_scale: standard deviation of the Gaussian prior; ``"marginal likelihood"`` finds the one that the data speak for. The
            network is trained (``epochs`` above 0) under the given one, or under 1.
        per_layer: one prior scale for each layer, where it is found.
        predictive: ``"linearized"``, the network made linear in its weights, which is what the approximation is about;
            ``"sampled"``, networks with drawn weights; ``"probit"``, linearized logits shrunk by their variance, without draws (for
            classes). For a last layer that gives the outputs the first two are the same, at the price of one pass.
        curvature: ``"ggn"``, exact in the outputs, with a backward pass for each class; ``"sampled"``, an unbiased estimate
            of it from one drawn target, with one backward pass; ``"fisher"``, the empirical Fisher of the observed targets.
        damping: added to the precision of the posterior.
        newton: steps towards the mode under the prior before the end, each with another pass over the data or more; one makes a
            network that is linear in its weights exact, wherever training stopped, where the structure holds the whole curvature
            ("full" always does); with "diag" train first.

    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
    >>> posterior = Laplace("kron", epochs=0).fit(nn.Linear(2, 3), loader, progress=False)
    >>> posterior.predict(torch.zeros(1, 2), samples=16).probabilities.shape, posterior.functional_variance(torch.zeros(1, 2)).shape
    (torch.Size([1, 3]), torch.Size([1, 3, 3]))
    """

    structure: Literal["kron", "diag", "full"] = "kron"
    layers: str = field(default="last", kw_only=True)
    prior_scale: Positive | Literal["marginal likelihood"] = field(
        default="marginal likelihood", kw_only=True
    )  # type: ignore[assignment]
    per_layer: bool = field(default=False, kw_only=True)
    predictive: PredictiveName = field(default="linearized", kw_only=True)
    curvature: Literal["ggn", "fisher", "sampled"] = field(default="ggn", kw_only=True)
    damping: NonNegative = field(default=0.0, kw_only=True)
    newton: Annotated[int, Ge(0)] = field(default=0, kw_only=True)

    def memory(self, network: nn.Module, inputs: Any = None) -> int:
        """Bytes that a fit needs besides the network, told without allocating them.

        Args:
            network: the network.
            inputs: a few rows; with them the last layer is the one that is called last, else the one that the network has last.
        """
        seen = survey(network, inputs)
        layers = choose_layers(network, seen, self.layers, self.structure)
        return bytes_needed(self.structure, network, layers, seen)

    @takes(FitOptions)
    def fit(self, network: nn.Module, loader: Iterable[Any], **given: Any) -> LaplacePosterior:
        """As :meth:`Method.fit`. With ``num_data`` the loader's examples stand for so many."""
        model, run = self.setup(network, loader, given)
        num_data, model = run.num_data, without_nested(model)
        chosen, inputs, check = prepare(model, loader, run.likelihood)
        untrained = not _noise(run.likelihood) and isinstance(chosen, Gaussian) and chosen.noise == "learned"
        check_likelihood(chosen, self.predictive)
        seen = survey(model, inputs)
        layers = choose_layers(model, seen, self.layers, self.structure)
        shown = run.progress and is_main_process()
        memory = check_memory(self.structure, model, layers, seen, device_of(model), shown)
        scale = None if isinstance(self.prior_scale, str) else float(self.prior_scale)
        point = PointPosterior(model, chosen)
        if self.epochs:
            decay = 1.0 / ((scale or 1.0) ** 2 * run.count(loader))
            point = self.start(deepcopy(network), loader, run, decay)
        without_nested(point.model).eval()
        model, chosen = point.model, point.likelihood
        seed = run.seed
        devices = [device_of(model)] if device_of(model).type == "cuda" else []
        drawn = (
            int(torch.randint(2**31 - 1, ())) if seed is None and self.curvature == "sampled" else seed or 0
        )

        def batches(description: str) -> Any:
            return track(loader, description, shown)

        def noise() -> bool:
            if self.epochs or not untrained:
                return False
            learn_noise(model, chosen, batches("noise"))
            return True

        def curved() -> Curvature:
            data = batches("curvature")
            return measure(
                model, layers, self.structure, seen, chosen, data, self.curvature, check, drawn, num_data
            )

        with torch.random.fork_rng(devices) if seed is not None else nullcontext():
            if seed is not None:
                torch.manual_seed(seed)
            noise()
            found = curved()
            blocks, precisions, evidence = with_prior(
                found, model, layers, scale, self.per_layer, self.damping
            )
            for _ in range(self.newton):
                weight = 1.0 if num_data is None else num_data / found.seen
                data = batches("gradient")
                moved = newton_step(model, layers, chosen, data, weight, blocks, precisions, found, curved)
                if moved is None:
                    break
                found = curved() if noise() else moved
                blocks, precisions, evidence = with_prior(
                    found, model, layers, scale, self.per_layer, self.damping
                )
        return LaplacePosterior(
            model,
            chosen,
            blocks,
            self.predictive,
            log_evidence=evidence,
            precisions=precisions,
            direct=seen.direct if is_direct(layers, seen) else None,
            memory=memory,
            history=point.history,
        )


def _noise(likelihood: LikelihoodName) -> bool:
    """Whether a likelihood brings a noise that was learned before."""
    return (
        isinstance(likelihood, Gaussian)
        and likelihood.noise == "learned"
        and bool(likelihood.log_scale.any())
    )
