"""Measures training and prediction with Bayes by Backprop and MNF, as ratios to the deterministic network in the same run.

    python benchmarks/methods.py [--model lenet] [--batch 128] [--images 256] [--samples 128] [--rounds 40] [--threads 2]

Training is one step on one batch with fused Adam: forward, loss (with the KL divergence), backward, update. Prediction covers
everything from the inputs to the mean probabilities of ``images`` images with ``samples`` samples. It is compared with as many passes
of the deterministic network. The variants take turns within every round, so that other load of the machine affects all of them. The
ratio is the median over rounds.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from common import (
    MODELS,
    input_shape,
    interleave,
    parse_arguments,
    positive_int,
    print_ratios,
    select_variants,
    write_results,
)

import flowbnn as fb
from flowbnn.likelihoods import Categorical
from flowbnn.training.device import AUTOCAST_DTYPES

METHODS = {
    "Bayes by Backprop": fb.BayesByBackprop(),
    "Bayes by Backprop, scale mixture": fb.BayesByBackprop("scale-mixture"),
    "Bayes by Backprop, reparameterization": fb.BayesByBackprop(estimator="reparameterization"),
    "Bayes by Backprop, local": fb.BayesByBackprop(estimator="local"),
    "Bayes by Backprop, flipout": fb.BayesByBackprop(estimator="flipout"),
    "MNF": fb.MNF(),
}


class StepCaptured(Exception):
    """Raised to end a fit as soon as its training step is known."""


def make_step(
    method: Any, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]
) -> Callable[[], None]:
    """Returns a function that runs one training step of a method, as its ``fit`` does. None is the deterministic network."""
    if method is None:
        optimizer, likelihood = torch.optim.Adam(model.parameters(), fused=True), Categorical()

        def plain() -> None:
            optimizer.zero_grad()
            (-likelihood.log_prob(model(batch[0]), batch[1]).mean()).backward()
            optimizer.step()

        return plain
    from unittest import mock

    from flowbnn.methods import fitting
    from flowbnn.training.options import Clock

    captured: list[Any] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        captured.extend(args)
        raise StepCaptured

    with mock.patch.object(fitting, "TrainingRun", run), suppress(StepCaptured):
        method.fit(model, [batch], num_data=50_000, progress=False)
    objective, optimizer = captured[:2]
    clock = Clock(0, 1, 100, 10)

    def step() -> None:
        optimizer.zero_grad()
        loss, _ = objective(batch, clock)
        loss.backward()
        optimizer.step()

    return step


def main() -> None:
    options = parse_arguments(
        __doc__,
        samples={"type": positive_int, "default": 128},
        images={"type": positive_int, "default": 256},
        only={"default": "", "help": "'training' or 'prediction'"},
        methods={"default": "", "help": "words of variant names to measure, separated by commas"},
    )
    if options.only not in ("", "training", "prediction"):
        raise SystemExit(f"--only must be 'training' or 'prediction', got '{options.only}'")
    methods = {name: METHODS[name] for name in select_variants(options.methods, METHODS)}
    torch.manual_seed(0)
    shape, device = input_shape(options.model), options.device
    batch = (
        torch.randn(options.batch, *shape, device=device),
        torch.randint(10, (options.batch,), device=device),
    )
    rows: dict[str, Any] = {}
    if options.only in ("", "training"):
        steps = {
            name: make_step(method, MODELS[options.model]().to(device), batch)
            for name, method in {"plain": None, **methods}.items()
        }
        title = f"{options.model}, training step, batch {options.batch}, {device}, {options.threads} threads, {options.rounds} rounds"
        rows["training"] = print_ratios(title, interleave(steps, options.rounds, device, warm=3))
    if options.only in ("", "prediction"):
        rows["prediction"] = measure_prediction(options, methods, batch)
    write_results(options, f"methods-{options.model}", rows)


def measure_prediction(options: Any, methods: dict[str, Any], batch: Any) -> Any:
    """Measures predictions, prints the table and returns its rows."""
    device, precision = options.device, options.precision
    plain = MODELS[options.model]().eval().to(device)
    images = torch.randn(options.images, *input_shape(options.model), device=device)

    def run_plain() -> None:
        dtype = AUTOCAST_DTYPES.get(precision)
        with (
            torch.inference_mode(),
            torch.autocast(torch.device(device).type, dtype, enabled=dtype is not None),
        ):
            for _ in range(options.samples):
                plain(images)

    def make_prediction(method: Any) -> Callable[[], Any]:
        posterior = method.fit(
            plain, [(batch[0][:8].cpu(), batch[1][:8].cpu())], num_data=8, progress=False, seed=0
        )
        return lambda: posterior.predict(images, options.samples, seed=0, precision=precision).probabilities

    # the estimators differ in training only
    one_epoch = {"Bayes by Backprop": fb.BayesByBackprop(epochs=1), "MNF": fb.MNF(epochs=1)}
    steps: dict[str, Any] = {"plain": run_plain}
    steps |= {name: make_prediction(method) for name, method in one_epoch.items() if name in methods}
    title = f"{options.model}, {options.images} images, {options.samples} samples, {device}, {options.threads} threads"
    return print_ratios(title, interleave(steps, max(3, options.rounds // 8), device, warm=1))


if __name__ == "__main__":
    main()
