r"""Laplace approximation: a Gaussian around the trained network (MacKay 1992; Ritter et al. 2018; Daxberger et al. 2021).

.. math:: q(w) = \mathcal N(\hat w, (H + \delta I)^{-1}), \qquad H = \sum_i J_i^T \Lambda_i J_i

with the Jacobian :math:`J_i` of the outputs at the trained weights :math:`\hat w`, the Hessian :math:`\Lambda_i` of the loss in the
outputs, and the prior precision :math:`\delta`, by default the one with the highest marginal likelihood of the training data. So is
the learned noise of a Gaussian likelihood, one factor of what the residuals of each output say. The network
is differentiated in evaluation mode, with the running statistics of its BatchNorm layers. https://arxiv.org/abs/2106.14806
"""

from collections.abc import Iterable
from dataclasses import KW_ONLY
from typing import Annotated, Any, Literal

from torch import nn

from flowbnn.likelihoods import Gaussian, learns_noise
from flowbnn.methods.base import FitOptions, Method, register_method
from flowbnn.methods.fitting import prepare
from flowbnn.methods.laplace.curvature import Problem
from flowbnn.methods.laplace.derivatives import check_likelihood
from flowbnn.methods.laplace.layer_choice import choose_layers, survey
from flowbnn.methods.laplace.posterior import LaplacePosterior, PredictiveName
from flowbnn.methods.laplace.prior import Prior, make_louder, newton_step, warn_of_slope, with_prior
from flowbnn.methods.layer_modes import without_nested
from flowbnn.options import Ge, Positive, accepts_options_of, options
from flowbnn.posterior.point import PointPosterior
from flowbnn.regression import fit_residual_scale
from flowbnn.training import is_main_process, track
from flowbnn.training.randomness import preserve_rng_state


@register_method
@options(repr=False)
class Laplace(Method):
    r"""A Gaussian around the trained weights, from the curvature of the loss.

    ``epochs=0`` uses a trained network as it is, and then costs little more than one pass over the data for the last layer.

    Args:
        structure: of the covariance: ``"kron"``, a Kronecker product for each layer, its bias included; ``"diag"``; ``"full"``.
            Kronecker factors serve Linear and Conv1d, 2d, 3d layers; the scales and shifts of normalization layers then stay as
            trained. "diag" and "full" serve any layer, tied weights included.
        layers: ``"last"``, the layer with weights that is called last; ``"all"``; or a glob of names. Frozen weights stay out.
        prior_scale: standard deviation of the Gaussian prior; ``"marginal likelihood"`` chooses it by the evidence. The network is
            trained (``epochs`` above 0) under the given one, or under 1.
        per_layer: choose one prior scale for each layer.
        predictive: ``"linearized"``, the network made linear in its weights, for which the approximation is exact;
            ``"sampled"``, networks with drawn weights; ``"probit"``, linearized logits shrunk by their variance, without draws (for
            classes). For a last layer that gives the outputs the first two are the same, at the price of one pass.
        curvature: ``"ggn"``, exact in the outputs, with a backward pass for each class; ``"sampled"``, an unbiased estimate
            of it from one drawn target, with one backward pass; ``"fisher"``, the empirical Fisher of the observed targets.
        newton: steps of Newton's method, each with two passes over the data or more, to the mode under the prior; a prior (and noise)
            chosen by marginal likelihood is chosen together with the mode that goes with it. One makes a network that is linear in
            its weights exact, wherever training stopped, if the structure holds the whole curvature ("full" always does); with
            "diag" train first. It stops when there is nothing left to gain; what is left after the last one is warned of.

    >>> import torch
    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
    >>> posterior = Laplace("kron", epochs=0).fit(nn.Linear(2, 3), loader, progress=False)
    >>> posterior.predict(torch.zeros(1, 2), samples=16).probabilities.shape, posterior.functional_variance(torch.zeros(1, 2)).shape
    (torch.Size([1, 3]), torch.Size([1, 3, 3]))
    """

    structure: Literal["kron", "diag", "full"] = "kron"
    _: KW_ONLY
    layers: str = "last"
    prior_scale: Positive | Literal["marginal likelihood"] = "marginal likelihood"  # type: ignore[assignment]
    per_layer: bool = False
    predictive: PredictiveName = "linearized"
    curvature: Literal["ggn", "fisher", "sampled"] = "ggn"
    newton: Annotated[int, Ge(0)] = 0

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Iterable[Any], **given: Any) -> LaplacePosterior:
        """As :meth:`Method.fit`. With ``num_data`` the loader's examples stand for so many."""
        model, run = self.setup(network, loader, given)
        trains = self.epochs > 0 or self.newton > 0
        likelihood, inputs, check = prepare(without_nested(model), loader, run.likelihood, run.seed, trains)
        check_likelihood(likelihood, self.predictive)
        seen = survey(model, inputs)
        layers = choose_layers(model, seen, self.layers, self.structure)
        scale = None if isinstance(self.prior_scale, str) else float(self.prior_scale)
        point = PointPosterior(model, likelihood)
        if self.epochs:
            point = self.start(model, loader, run, 1.0 / ((scale or 1.0) ** 2 * run.count(loader)))
        model, likelihood = model.eval(), point.likelihood
        several = isinstance(likelihood, Gaussian) and likelihood.dim > 1
        prior = Prior(scale, self.per_layer, learns=learns_noise(likelihood))

        def batches(description: str) -> Any:
            return track(loader, description, run.progress and is_main_process())

        problem = Problem(
            model=model,
            layers=layers,
            seen=seen,
            likelihood=likelihood,
            batches=batches,
            check=check,
            structure=self.structure,
            kind=self.curvature,
            seed=run.some_seed,
            total=run.num_data,
        )
        with preserve_rng_state(loader, run.seed):
            if prior.learns:
                fit_residual_scale(model, likelihood, batches("noise"))
            curvature = problem.measure()
            if not self.newton:
                relative, noise = prior.choose(problem, curvature)
                deltas = [delta / noise for delta in relative]
                if prior.learns:
                    make_louder(problem, noise)
                    curvature = problem.measure()
            for number in range(self.newton):
                # one factor serves all: how they compare is read anew
                if number and prior.learns and several:
                    fit_residual_scale(model, likelihood, batches("noise"))
                    curvature = problem.measure()
                curvature, deltas, more = newton_step(problem, curvature, prior)
                if not more:
                    break
            blocks, evidence = with_prior(problem, curvature, deltas)
            if self.newton and more:
                warn_of_slope(problem, curvature, blocks, deltas)
        return LaplacePosterior(
            model,
            likelihood,
            blocks,
            self.predictive,
            log_evidence=evidence,
            precisions=dict(zip(layers, deltas, strict=True)),
            direct=problem.direct,
            history=point.history,
        )
