"""Callbacks for the ``Trainer`` of Lightning: noise that is trained with the weights, and calibration at the end.

A ``LightningModule`` with noise that is trained without :class:`NoiseCallback` has no KL divergence, and its noise collapses. A warning
is raised if the module itself was converted by :func:`~flowbnn.to_stochastic`.
"""

from typing import Any

from torch import nn

from flowbnn.errors import optional_import, requirement_error, warn

try:
    from lightning.pytorch import Callback
except ImportError:
    with optional_import("flowbnn.integrations.lightning", "lightning", "flowbnn[lightning]"):
        from pytorch_lightning import Callback

from flowbnn.calibrate import calibrate
from flowbnn.data.formats import as_loader
from flowbnn.integrations.kl import KLTerm, make_posterior
from flowbnn.methods.fit_options import LikelihoodName
from flowbnn.noise import noise_layers
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.noise import NoisePosterior


class NoiseCallback(Callback):
    r"""Adds the KL divergence of the noise to the loss of a ``LightningModule``, so that its ``Trainer`` maximizes the ELBO.

    The loss must be the mean negative log-likelihood of the examples, such as ``F.cross_entropy(logits, labels)``. The term is
    :math:`\frac{\beta}{N} \mathrm{KL}`. It is added before every step of an optimizer that trains noise, in automatic and manual
    optimization. It is logged as ``kl``. For a separate learning rate of the noise, use
    ``fb.parameter_groups(network, weight_lr, noise_lr)`` in ``configure_optimizers``.

    Args:
        num_data: Number :math:`N` of training examples. By default, it is read from the training loader.
        beta: Weight :math:`\beta` of the KL divergence.
        warmup: Fraction of the run over which the weight of the KL divergence grows from 0 to ``beta``.

    >>> callback = NoiseCallback()
    >>> # trainer = lightning.Trainer(callbacks=[callback]); trainer.fit(module, train_loader)
    >>> # posterior = callback.posterior(module, train_loader)
    """

    def __init__(self, num_data: int | None = None, beta: float = 1.0, warmup: float = 0.0) -> None:
        super().__init__()
        self.term = KLTerm(num_data, beta, warmup)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Checks the module and counts the training examples."""
        loader = trainer.train_dataloader
        size = getattr(loader, "batch_size", None)
        max_data = None
        if isinstance(size, int):
            max_data = int(trainer.num_training_batches) * size * int(trainer.world_size)
        self.term.begin(pl_module, loader, max_data)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Adds the gradient of the KL divergence."""
        parameters = [value for group in optimizer.param_groups for value in group["params"]]
        progress = 1.0
        if self.term.warmup:
            progress = trainer.global_step / max(1.0, float(trainer.estimated_stepping_batches))
        self.term.add_gradient(pl_module, parameters, progress, trainer.global_step)
        if self.term.history:
            pl_module.log("kl", self.term.history[-1])

    def posterior(self, module: nn.Module, data: Any, likelihood: LikelihoodName = "auto") -> NoisePosterior:
        """Returns the posterior of the trained module.

        Args:
            module: Trained module, whose ``forward`` returns the outputs.
            data: Data with inputs and targets.
            likelihood: Likelihood of the targets, or its name.
        """
        return make_posterior(module, data, likelihood)


class CalibrationCallback(Callback):
    """Calibrates the module by :func:`~flowbnn.calibrate` when ``Trainer.fit`` ends. The module itself is not changed.

    Args:
        held_out: Held-out data that the training does not read, of any format. None for the validation data of the trainer.
        options: Options of :func:`~flowbnn.calibrate`.

    Attributes:
        posterior: Calibrated posterior after the training, None before.

    >>> callback = CalibrationCallback(progress=False)
    >>> callback.posterior is None
    True
    """

    def __init__(self, held_out: Any = None, **options: Any) -> None:
        super().__init__()
        self.held_out, self.options = held_out, options
        self.posterior: Posterior | None = None

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Calibrates the module."""
        data = self.held_out
        if data is None:
            loaders = trainer.val_dataloaders
            data = loaders[0] if isinstance(loaders, list | tuple) and loaders else loaders
            if data is None and trainer.datamodule is not None:  # a module without validation_step
                data = as_loader(trainer.datamodule, stage="validation")
        if data is None or (isinstance(data, list) and not data):
            hint, fields = "pass held_out=", {"kind": "loader", "argument": "held_out"}
            raise requirement_error("CalibrationCallback", "held-out data", hint=hint, **fields)
        self.posterior = calibrate(pl_module, data, **self.options)


class KLGuard(Callback):
    """Raises a warning if a module with noise is trained without :class:`NoiseCallback`."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Checks the callbacks of the trainer."""
        layers = noise_layers(pl_module)
        trained = any(p.requires_grad for layer in layers.values() for p in layer.parameters())
        if trained and not any(isinstance(callback, NoiseCallback) for callback in trainer.callbacks):
            advice = "add flowbnn.integrations.lightning.NoiseCallback() to the Trainer, or use fb.fit"
            text = f"the noise of this LightningModule has no KL divergence and will collapse; {advice}"
            warn(text, kind="kl", layers=list(layers))
