"""What Bayes by Backprop and multiplicative flows cost in training and prediction, as ratios to the plain network's in the same run.

    python benchmarks/methods.py [--model lenet] [--batch 128] [--images 256] [--samples 128] [--rounds 40] [--threads 2]

Training: one batch, fused Adam, forward, loss (with the KL), backward, update. Prediction: everything from the inputs to the mean
probabilities of ``images`` images with ``samples`` samples, next to the plain network's time for images times samples. The variants
take turns within every round, so that whatever else the machine does falls on all of them; the ratio is the median of the rounds'.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from common import MODELS, arguments, chosen, interleave, positive, report, shape_of, write

import flowbnn as fb
from flowbnn.likelihoods import Categorical
from flowbnn.posterior.prediction import casting
from flowbnn.training.device import AUTOCAST_DTYPES

METHODS = {
    "Bayes by Backprop": fb.BayesByBackprop(),
    "Bayes by Backprop, scale mixture": fb.BayesByBackprop("scale-mixture"),
    "Bayes by Backprop, reparameterization": fb.BayesByBackprop(estimator="reparameterization"),
    "Bayes by Backprop, local": fb.BayesByBackprop(estimator="local"),
    "Bayes by Backprop, flipout": fb.BayesByBackprop(estimator="flipout"),
    "MNF": fb.MNF(),
}


class Stopped(Exception):
    """The step is here: no more is wanted of the run."""


def step_of(
    method: Any, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]
) -> Callable[[], None]:
    """One training step of a method, as its own ``fit`` takes it."""
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

    caught: list[Any] = []

    def train(*given: Any, **more: Any) -> Any:
        caught.extend(given)
        raise Stopped

    with mock.patch.object(fitting, "train", train), suppress(Stopped):
        method.fit(model, [batch], num_data=50_000, progress=False)
    objective, optimizer = caught[:2]
    clock = Clock(0, 1, 100, 10)

    def take() -> None:
        optimizer.zero_grad()
        loss, _ = objective(batch, clock)
        loss.backward()
        optimizer.step()

    return take


def main() -> None:
    found = arguments(
        __doc__,
        samples={"type": positive, "default": 128},
        images={"type": positive, "default": 256},
        only={"default": "", "help": "'training' or 'prediction'"},
        methods={"default": "", "help": "variants to keep, by a part of their name, with commas"},
    )
    if found.only not in ("", "training", "prediction"):
        raise SystemExit(f"--only is 'training' or 'prediction', not '{found.only}'")
    methods = {name: METHODS[name] for name in chosen(found.methods, METHODS)}
    torch.manual_seed(0)
    shape, device = shape_of(found.model), found.device
    batch = (
        torch.randn(found.batch, *shape, device=device),
        torch.randint(10, (found.batch,), device=device),
    )
    rows: dict[str, Any] = {}
    if found.only in ("", "training"):
        steps = {
            name: step_of(method, MODELS[found.model]().to(device), batch)
            for name, method in {"plain": None, **methods}.items()
        }
        title = f"{found.model}, training step, batch {found.batch}, {device}, {found.threads} threads, {found.rounds} rounds"
        rows["training"] = report(title, interleave(steps, found.rounds, device, warm=3))
    if found.only in ("", "prediction"):
        rows["prediction"] = predict(found, methods, batch)
    write(found, f"methods-{found.model}", rows)


def predict(found: Any, methods: dict[str, Any], batch: Any) -> Any:
    device, precision = found.device, found.precision
    plain = MODELS[found.model]().eval().to(device)
    images = torch.randn(found.images, *shape_of(found.model), device=device)

    def plainly() -> None:
        with torch.inference_mode(), casting(torch.device(device), AUTOCAST_DTYPES.get(precision)):
            for _ in range(found.samples):
                plain(images)

    def predicting(method: Any) -> Callable[[], Any]:
        posterior = method.fit(
            plain, [(batch[0][:8].cpu(), batch[1][:8].cpu())], num_data=8, progress=False, seed=0
        )
        return lambda: posterior.predict(images, found.samples, seed=0, precision=precision).probabilities

    # the ways of training differ, what is left of them at prediction does not
    one_epoch = {"Bayes by Backprop": fb.BayesByBackprop(epochs=1), "MNF": fb.MNF(epochs=1)}
    steps: dict[str, Any] = {"plain": plainly}
    steps |= {name: predicting(method) for name, method in one_epoch.items() if name in methods}
    title = (
        f"{found.model}, {found.images} images, {found.samples} samples, {device}, {found.threads} threads"
    )
    return report(title, interleave(steps, max(3, found.rounds // 8), device, warm=1))


if __name__ == "__main__":
    main()
