"""``fb.fit``: fits the noise and the weights of a stochastic network by the ELBO."""

from typing import Any

from torch import nn

from flowbnn.data.formats import columns_of
from flowbnn.methods.fitting import hold_out
from flowbnn.methods.variational.held_out.verification import verify_fit
from flowbnn.methods.variational.initial_state import InitialState
from flowbnn.methods.variational.noise_fit import FitData, NoiseFitOptions, check_trainable, maximize_elbo
from flowbnn.methods.variational.report import finish_fit
from flowbnn.networks import copy_network, select_output, set_input_columns, unwrap_compiled
from flowbnn.options import accepts_options_of, check
from flowbnn.posterior.noise import NoisePosterior


@accepts_options_of(NoiseFitOptions)
def fit(network: nn.Module, loader: Any, *, inplace: bool = False, **options: Any) -> NoisePosterior:
    r"""Fits the noise and the weights of a stochastic network by the ELBO, if that improves its predictions.

    .. math:: \max \; E_q[\log p(D \mid z)] - \beta \sum_l \mathrm{KL}[q(z_l) \| p(z_l)] + \gamma \sum_l H(q(z_l))

    The fit is compared with the given network on held-out data:

    1. A tenth of the data is held out, and the noise is fitted to the other 90 %. A result that is better on the held-out rows is
       returned. On fewer than 200 held-out rows, the gain must exceed two standard errors. Noise whose width cannot be reduced, such
       as dropout, is always returned.
    2. Otherwise, the given weights may have been trained on these rows. In this case, networks of the same architecture are retrained
       without them, and compared with and without noise. If noise is better there, it is fitted to all data. Otherwise, the given
       network is returned.
    3. If step 2 does not apply or cannot decide, a result that is not worse is returned. A worse one is fitted again with early
       stopping.
    4. If it is still worse, the given network is returned with noise of almost no width, and a warning is raised.

    With fewer than 20 rows, the noise is fitted to all rows, and step 1 uses a cross-validation of about five folds. Steps 2 to 4
    follow, but nothing is fitted again: if step 2 accepts the noise, the fit to all rows is returned, and step 3 has no early stopping.

    Args:
        network: Network with noise, from :func:`~flowbnn.to_stochastic`. It is copied, unless ``inplace`` is True.
        loader: Training data: a ``DataLoader`` or a list of batches ``(inputs, targets)``, a ``Dataset``, a pair of tensors or arrays
            (numpy, pandas), or a dictionary with ``labels``. See :func:`~flowbnn.data.formats.as_loader`.
        inplace: If True, trains ``network`` itself instead of a copy.
        epochs: Number of passes over the loader. By default, training ends when the ELBO has reached a plateau, see
            :class:`~flowbnn.methods.schedule.PlateauSchedule`.
        weight_lr: Learning rate of the weights. To fit the noise alone, use ``freeze(network, "weights")``.
        noise_lr: Learning rate of the noise. By default, it is 10 divided by the number of steps if ``epochs`` is set, and otherwise 20
            divided by the largest number of steps. It is at least 0.002 and at most 0.05. For regression with learned noise it is 0.05.
        weight_decay: Weight decay of the weights.
        beta: Weight of the KL divergence.
        warmup: Fraction of the run over which the weight of the KL divergence grows from 0 to ``beta``.
        gamma: Weight of the entropy.
        repeats: Number of copies of each example in a batch, each with noise of its own. The gradient has less variance, at
            ``repeats`` times the cost of a step. Dropout of whole filters with repeated examples is the best single Wide ResNet of
            Nado et al. 2021 (https://arxiv.org/abs/2106.04015); see also Hoffer et al. 2019 (https://arxiv.org/abs/1901.09335).
        optimizer: Function from parameter groups to an optimizer. Adam by default.
        schedule: Learning-rate schedule. ``"cosine"`` decays the rates to zero, from the start if ``epochs`` is set and otherwise after
            the plateau. None keeps them constant. A :class:`~flowbnn.methods.schedule.PlateauSchedule` changes the rules for the
            plateau. A function from ``(optimizer, number of steps)`` to a scheduler is stepped at every batch.
        validation: Fraction of the data that is held out, or a loader of held-out data. With None, the noise is fitted to all data and
            always returned.
        validation_samples: Number of networks per prediction on the validation data, whose negative log-likelihood (NLL) is recorded.
        report: If True, computes the report of the fit.
        options: Options of :class:`~flowbnn.methods.FitOptions`, such as ``likelihood``, ``batch_size``, ``output``, ``num_data``,
            ``checkpoint``, ``resume``, ``early_stop``, ``callbacks``, ``log``, ``seed``, ``precision``, ``devices`` and ``progress``.

    Returns:
        Posterior of a fitted copy of the network. Its ``history`` has the ELBO, the log-likelihood, the KL divergence and the entropy
        of every epoch in nats. ``kl/name`` and ``entropy/name`` are the values of a single layer. Its ``report`` names collapsed layers
        and compares the ELBO and the held-out log-likelihood before and after the fit. A warning is raised for every problem in the
        report. If the given network is returned, ``history`` is empty.

    Raises:
        FlowBNNError: If the network has no noise or nothing to train, or if network, loader and likelihood do not fit together.

    >>> import torch, flowbnn as fb
    >>> network = fb.to_stochastic(nn.Linear(2, 3), {"*": fb.noise.NormalAffine()})
    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
    >>> fb.fit(network, loader, epochs=2, validation=None, report=False, progress=False)
    NoisePosterior(Linear, 1 layer with noise, Categorical(), 2 epochs)
    """
    fit_options = NoiseFitOptions(**options)
    check("network", network, nn.Module, "fit")
    check("inplace", inplace, bool, "fit")
    model = unwrap_compiled(network) if inplace else copy_network(network)
    model = select_output(model, fit_options.output)
    check_trainable(model, fit_options)
    loader = fit_options.training_loader(loader)
    set_input_columns(model, columns_of(loader))
    training = FitData(*hold_out(loader, fit_options))
    finished = maximize_elbo(model, *training, InitialState.of(model))
    decision = verify_fit(finished, FitData(loader, fit_options), training)
    return finish_fit(decision, fit_options.report, fit_options.progress)
