"""Callbacks for the ``Trainer`` of transformers: noise that is trained with the weights, and calibration at the end.

Without a callback, the model of a ``Trainer`` is calibrated by ``fb.calibrate(trainer.model, trainer.get_eval_dataloader())``.
"""

from typing import Any

from torch import nn

from flowbnn.errors import FlowBNNError, optional_import

with optional_import("flowbnn.integrations.huggingface", "transformers", "flowbnn[huggingface]"):
    from transformers import TrainerCallback

from flowbnn.calibrate import calibrate
from flowbnn.integrations.kl import KLTerm, make_posterior
from flowbnn.methods.fit_options import LikelihoodName
from flowbnn.noise.adapters import is_adapter
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.noise import NoisePosterior


class NoiseCallback(TrainerCallback):
    r"""Adds the KL divergence of the noise to the loss of a ``Trainer``, which then maximizes the ELBO.

    The loss must be the mean negative log-likelihood of the examples, as that of models for sequence and image classification. The term
    is :math:`\frac{\beta}{N} \mathrm{KL}`. Its gradient is added once before every step of the optimizer, for any accumulation of
    gradients. For a loss per token, set ``num_data`` to the number of tokens.

    Args:
        num_data: Number :math:`N` of training examples. By default, it is read from the training data.
        beta: Weight :math:`\beta` of the KL divergence.
        warmup: Fraction of the run over which the weight of the KL divergence grows from 0 to ``beta``.

    >>> callback = NoiseCallback()
    >>> # trainer = Trainer(fb.to_stochastic(model, rules), args, train_dataset=data, callbacks=[callback])
    >>> # trainer.train(); posterior = callback.posterior(trainer.model, trainer.get_eval_dataloader())
    """

    def __init__(self, num_data: int | None = None, beta: float = 1.0, warmup: float = 0.0) -> None:
        self.term = KLTerm(num_data, beta, warmup)
        self.refusals: list[tuple[nn.Module, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Checks the model and counts the training examples."""
        if args.fp16 and not args.max_grad_norm:
            text = "fp16 without max_grad_norm leaves scaled gradients; set max_grad_norm or use bf16"
            raise FlowBNNError(text, kind="precision", argument="args")
        self.term.begin(model, kwargs.get("train_dataloader"))
        # checkpoints of a Trainer hold the state of the whole network, except of adapters
        if not any(is_adapter(module) for module in model.modules()):
            for module in model.modules():
                if "save_pretrained" in vars(module):
                    self.refusals.append((module, vars(module).pop("save_pretrained")))

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Adds the gradient of the KL divergence."""
        progress = state.global_step / max(1, state.max_steps)
        self.term.add_gradient(model, progress=progress, seed=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restores the error of ``save_pretrained``, which drops the noise when it is loaded."""
        while self.refusals:
            module, refusal = self.refusals.pop()
            vars(module)["save_pretrained"] = refusal

    def posterior(self, model: nn.Module, data: Any, likelihood: LikelihoodName = "auto") -> NoisePosterior:
        """Returns the posterior of the trained model.

        Args:
            model: Trained model.
            data: Data with inputs and labels, such as ``trainer.get_eval_dataloader()``.
            likelihood: Likelihood of the labels, or its name.
        """
        return make_posterior(model, data, likelihood)


class CalibrationCallback(TrainerCallback):
    """Calibrates the model by :func:`~flowbnn.calibrate` when training ends. The model itself is not changed.

    Args:
        held_out: Held-out data that the training does not read, such as ``trainer.get_eval_dataloader()``.
        options: Options of :func:`~flowbnn.calibrate`.

    Attributes:
        posterior: Calibrated posterior after the training, None before.

    >>> # trainer.add_callback(CalibrationCallback(trainer.get_eval_dataloader())); trainer.train()
    """

    def __init__(self, held_out: Any, **options: Any) -> None:
        self.held_out, self.options = held_out, options
        self.posterior: Posterior | None = None

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Calibrates the model."""
        self.posterior = calibrate(model, self.held_out, **self.options)
