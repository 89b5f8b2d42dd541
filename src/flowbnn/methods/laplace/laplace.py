r"""Laplace approximation: a Gaussian around the trained network (MacKay 1992; Ritter et al. 2018; Daxberger et al. 2021).

.. math:: q(w) = \mathcal N(\hat w, (H + \delta I)^{-1}), \qquad H = \sum_i J_i^T \Lambda_i J_i

with the Jacobian :math:`J_i` of the outputs at the trained weights :math:`\hat w`, the Hessian :math:`\Lambda_i` of the loss in the
outputs, and the prior precision :math:`\delta`. By default :math:`\delta` maximizes the marginal likelihood of the training data,
together with a common factor of the learned noise of a Gaussian likelihood. The network is differentiated in evaluation mode, with the
running statistics of its BatchNorm layers. https://arxiv.org/abs/2106.14806
"""

from dataclasses import KW_ONLY
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import nn

from flowbnn.likelihoods import Gaussian, learns_noise
from flowbnn.methods.base import FitOptions, Method, register_method
from flowbnn.methods.laplace.comparison import compare_with_network
from flowbnn.methods.laplace.curvature import Curvature, CurvatureFit
from flowbnn.methods.laplace.derivatives import check_likelihood
from flowbnn.methods.laplace.layer_selection import select_layers, trace_layers
from flowbnn.methods.laplace.posterior import LaplacePosterior, PredictiveName
from flowbnn.methods.laplace.prior import (
    PriorSearch,
    add_prior,
    fit_prior,
    newton_gain,
    newton_step,
    warn_no_best_prior,
    warn_not_at_mode,
)
from flowbnn.methods.network_layers import disable_nested_tensors
from flowbnn.methods.preparation import prepare
from flowbnn.options import Ge, Positive, accepts_options_of, options
from flowbnn.posterior.weights import PointPosterior
from flowbnn.regression import fit_residual_scale
from flowbnn.training import is_main_process, track
from flowbnn.training.randomness import preserve_rng_state


@register_method
@options(repr=False)
class Laplace(Method):
    r"""Gaussian around the trained weights, from the curvature of the loss.

    ``epochs=0`` uses a trained network as it is. For the last layer this costs little more than one pass over the data.

    Args:
        structure: Structure of the covariance: ``"kron"`` (a Kronecker product per layer, bias included), ``"diag"`` or ``"full"``.
            Kronecker factors support Linear, Conv1d, Conv2d and Conv3d layers, and leave normalization layers as trained. ``"diag"``
            and ``"full"`` support any layer, tied weights included.
        layers: Layers with a posterior: ``"last"`` (the layer with weights that is called last), ``"all"``, or a glob of names.
            Frozen weights are excluded.
        prior_scale: Standard deviation of the Gaussian prior. ``"marginal likelihood"`` maximizes the evidence after training, which
            then uses a prior of scale 1. With ``validation`` data, smaller scales are tried as well, and that with the lowest negative
            log-likelihood (NLL) is used (``posterior.validation_nll``).
        per_layer: If True, every layer has its own prior scale.
        predictive: Method of prediction. ``"linearized"`` linearizes the network in its weights, for which the approximation is
            exact. ``"sampled"`` uses networks with sampled weights. ``"probit"`` divides linearized logits by a function of their
            variance, without sampling (classification only). For an output layer the first two are the same and take one forward pass.
        curvature: Hessian in the outputs. ``"ggn"`` is exact and takes one backward pass per class. ``"sampled"`` is an unbiased
            estimate from one drawn target, with one backward pass. ``"fisher"`` is the empirical Fisher of the observed targets.
        newton_steps: Maximum number of Newton steps to the mode under the prior. Each takes at least two passes over the data. A prior
            (and noise) that maximizes the evidence is updated at every step. For a network that is linear in its weights, one step
            with ``"full"`` is exact. With ``"diag"``, train the network first. A warning is raised if the steps do not converge.

    >>> import torch
    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
    >>> posterior = Laplace("kron", epochs=0).fit(nn.Linear(2, 3), loader, progress=False)
    >>> posterior.predict(torch.zeros(1, 2), samples=16).probabilities.shape, posterior.functional_variance(torch.zeros(1, 2)).shape
    (torch.Size([1, 3]), torch.Size([1, 3, 3]))
    """

    supports_weights: ClassVar[bool] = False

    structure: Literal["kron", "diag", "full"] = "kron"
    _: KW_ONLY
    layers: str = "last"
    prior_scale: Positive | Literal["marginal likelihood"] = "marginal likelihood"  # type: ignore[assignment]
    per_layer: bool = False
    predictive: PredictiveName = "linearized"
    curvature: Literal["ggn", "fisher", "sampled"] = "ggn"
    newton_steps: Annotated[int, Ge(0)] = 0

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Any, **kwargs: Any) -> LaplacePosterior:
        """Fits the posterior; see :meth:`Method.fit`. ``num_data`` is the number of examples that the loader represents."""
        model, loader, options = self.setup(network, loader, kwargs)
        trains = self.trains or self.newton_steps > 0
        prepared = prepare(disable_nested_tensors(model), loader, options, trains)
        check_likelihood(prepared.likelihood, self.predictive)
        calls = trace_layers(model, prepared.inputs)
        layers = select_layers(model, calls, self.layers, self.structure)
        scale = None if isinstance(self.prior_scale, str) else float(self.prior_scale)
        point = PointPosterior(model, prepared.likelihood)
        if self.trains:
            weight_decay = 1.0 / ((scale or 1.0) ** 2 * options.num_examples(loader))
            point = self.fit_point(model, loader, options, weight_decay, prepared)
        model, likelihood = model.eval(), point.likelihood

        def batches(description: str) -> Any:
            return track(loader, description, options.progress and is_main_process())

        fit = CurvatureFit(
            model=model,
            layers=layers,
            calls=calls,
            likelihood=likelihood,
            batches=batches,
            check=prepared.check_batch,
            structure=self.structure,
            hessian=self.curvature,
            seed=options.resolve_seed(),
            num_data=options.num_data,
        )
        prior = PriorSearch(scale, self.per_layer, learns_noise(likelihood))
        with preserve_rng_state(loader, options.seed):
            curvature, deltas, converged = self._find_mode(fit, prior)
            blocks, evidence = add_prior(fit, curvature, deltas)
            if not converged:
                warn_not_at_mode(newton_gain(fit, curvature, blocks, deltas))
        posterior = LaplacePosterior(
            model,
            likelihood,
            blocks,
            self.predictive,
            log_evidence=evidence,
            precisions=dict(zip(layers, deltas, strict=True)),
            output_layer=fit.output_layer,
            history=point.history,
        )
        with preserve_rng_state(
            loader if options.validation_loader is None else options.validation_loader, options.seed
        ):
            compare_with_network(posterior, options.validation_loader, loader, choose=scale is None)
        return posterior

    def _find_mode(self, fit: CurvatureFit, prior: PriorSearch) -> tuple[Curvature, list[float], bool]:
        """Finds prior, noise and, by Newton steps, the mode.

        Returns:
            The curvature at the final weights, the prior precision of each layer, and False if the Newton steps did not converge.
        """
        likelihood = fit.likelihood
        if prior.learns_noise:
            fit_residual_scale(fit.model, likelihood, fit.batches("noise"))
        curvature = fit.measure()
        if not self.newton_steps:
            return *fit_prior(fit, curvature, prior), True
        start = {name: value.detach().clone() for name, value in fit.weights.items()}
        several_targets = isinstance(likelihood, Gaussian) and likelihood.dim > 1
        for number in range(self.newton_steps):
            # the evidence finds one common factor; the ratios between targets are estimated again from the residuals
            if number and prior.learns_noise and several_targets:
                fit_residual_scale(fit.model, likelihood, fit.batches("noise"))
                curvature = fit.measure()
            curvature, deltas, gained, at_bound = newton_step(fit, curvature, prior)
            if not gained:
                break
        if not at_bound:
            return curvature, deltas, not gained
        warn_no_best_prior()
        with torch.no_grad():
            for name, value in start.items():
                fit.weights[name].copy_(value)
        if prior.learns_noise:
            fit_residual_scale(fit.model, likelihood, fit.batches("noise"))
        return *fit_prior(fit, fit.measure(), prior), True
