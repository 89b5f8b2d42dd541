"""Log-evidence of the noise of a small network by the estimators of ``fb.diagnostics.evidence`` and by an independent estimate.

    python benchmarks/evidence.py [--seeds 3] [--first 0] [--draws 200000] [--out FILE]

A network with two hidden layers of twelve units is trained on 200 points of two spirals. Its noise, 26 dimensions with the prior
N(1, 0.5^2), has a joint Gaussian posterior for 80 other points. The independent estimate uses neither the chains nor the densities of
the library:

1. The log-joint density is written out for this network.
2. Adam climbs it from draws of the prior, and the Hessian at each end gives a Gaussian.
3. A mixture of Student's t distributions with these centers and covariances, and of the prior, is adapted twice to its own weighted
   draws, by the weights of its components.
4. Importance sampling from this mixture gives the log-evidence and its standard error. The ELBO is the mean log-joint density of draws
   of the posterior plus the entropy of their covariance.

Chains can miss modes, and the mixture has heavier tails than the posterior, so that the two estimates fail for different reasons.
Differences are in nats, with standard errors. The gap is the log-evidence minus the ELBO.
"""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from common import make_parser
from torch import Tensor

import flowbnn as fb
from flowbnn.diagnostics.noise_target import NoiseTarget

PRIOR_SCALE = 0.5
WIDTH = 12
SIZES = (2, WIDTH, WIDTH)


def spirals(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns points of two spirals, and the number of the spiral of each."""
    source = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=source)
    angle = 1.0 + 5.0 * torch.rand(count, generator=source).sqrt()
    direction = angle + math.pi * labels
    points = torch.stack([direction.cos(), direction.sin()], 1) * angle[:, None] / 3.0
    return points + 0.15 * torch.randn(count, 2, generator=source), labels


class LogJoint:
    """Log-joint density of the labels and the noise of a perceptron, which multiplies the inputs of its layers.

    Args:
        network: Trained network.
        inputs: Inputs.
        labels: Labels, 0 or 1.
    """

    def __init__(self, network: torch.nn.Module, inputs: Tensor, labels: Tensor) -> None:
        layers = [module for module in network.modules() if isinstance(module, torch.nn.Linear)]
        self.weights = [layer.weight.detach().double() for layer in layers]
        self.biases = [layer.bias.detach().double() for layer in layers]
        self.inputs, self.labels = inputs.double(), labels

    def __call__(self, noise: Tensor) -> Tensor:
        """Returns the density of every row of ``noise``."""
        hidden = self.inputs.expand(len(noise), -1, -1)
        for number, part in enumerate(noise.split(SIZES, 1)):
            hidden = (hidden * part[:, None]) @ self.weights[number].T + self.biases[number]
            hidden = hidden.relu() if number < len(SIZES) - 1 else hidden
        log_likelihood = hidden.log_softmax(-1)[:, torch.arange(len(self.labels)), self.labels].sum(1)
        squares = ((noise - 1.0) / PRIOR_SCALE).square().sum(1)
        return (
            log_likelihood - 0.5 * squares - noise.shape[1] * math.log(PRIOR_SCALE * math.sqrt(2 * math.pi))
        )

    def in_chunks(self, noise: Tensor) -> Tensor:
        """Returns the density of many rows."""
        return torch.cat([self(chunk) for chunk in noise.split(4096)])


class Proposal:
    """Mixture of Student's t distributions with 5 degrees of freedom.

    Args:
        centers: Centers ``[K, D]``.
        roots: Cholesky factors of the scale matrices, ``[K, D, D]``.
    """

    degrees = 5.0

    def __init__(self, centers: Tensor, roots: Tensor) -> None:
        self.centers, self.roots = centers, roots
        self.weights = torch.full((len(centers),), 1.0 / len(centers), dtype=centers.dtype)

    def draw(self, count: int, source: torch.Generator) -> Tensor:
        """Returns draws ``[S, D]``."""
        component = torch.multinomial(self.weights, count, replacement=True, generator=source)
        normal = torch.randn(count, self.centers.shape[1], dtype=torch.float64, generator=source)
        steps = torch.empty_like(normal)
        for number, root in enumerate(self.roots):
            steps[component == number] = normal[component == number] @ root.T
        squares = torch.randn(count, int(self.degrees), dtype=torch.float64, generator=source).square().sum(1)
        return self.centers[component] + steps * (self.degrees / squares).sqrt()[:, None]

    def components(self, noise: Tensor) -> Tensor:
        """Returns log-densities of the components, including their weights, ``[S, K]``."""
        dim, nu, columns = noise.shape[1], self.degrees, []
        constant = math.lgamma((nu + dim) / 2) - math.lgamma(nu / 2) - 0.5 * dim * math.log(nu * math.pi)
        for weight, center, root in zip(self.weights, self.centers, self.roots, strict=True):
            scaled = torch.linalg.solve_triangular(root, (noise - center).T, upper=False).square().sum(0)
            log_det = root.diagonal().log().sum()
            columns.append(weight.log() + constant - log_det - 0.5 * (nu + dim) * (scaled / nu).log1p())
        return torch.stack(columns, 1)


def climb(target: LogJoint, starts: Tensor, steps: int = 1500) -> Tensor:
    """Returns the ends of climbs by Adam."""
    position = starts.clone().requires_grad_()
    optimizer = torch.optim.Adam([position], lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        (-target(position)).sum().backward()
        optimizer.step()
        schedule.step()
    return position.detach()


def make_proposal(target: LogJoint, source: torch.Generator, climbs: int = 24) -> Proposal:
    """Returns a mixture with a component at the end of each climb, and one for the prior."""
    dim = sum(SIZES)
    starts = 1.0 + PRIOR_SCALE * torch.randn(climbs, dim, dtype=torch.float64, generator=source)
    centers, roots = (
        [torch.ones(dim, dtype=torch.float64)],
        [PRIOR_SCALE * torch.eye(dim, dtype=torch.float64)],
    )
    for end in climb(target, starts):
        hessian = -torch.autograd.functional.hessian(lambda noise: target(noise[None])[0], end)
        values, vectors = torch.linalg.eigh(hessian)  # a kink of ReLU at the end may have no proper Hessian
        covariance = (vectors / values.clamp(min=1.0 / PRIOR_SCALE**2)) @ vectors.T
        centers.append(end)
        roots.append(torch.linalg.cholesky(0.5 * (covariance + covariance.T)))
    return Proposal(torch.stack(centers), torch.stack(roots))


def importance_sampling(
    target: LogJoint, proposal: Proposal, draws: int, source: torch.Generator
) -> tuple[float, float, float]:
    """Returns the log-evidence, its standard error and the effective sample size, after two adaptations."""
    for last in (False, False, True):
        noise = proposal.draw(draws if last else draws // 10, source)
        components = torch.cat([proposal.components(chunk) for chunk in noise.split(4096)])
        log_weights = target.in_chunks(noise) - components.logsumexp(1)
        weights = log_weights.softmax(0)
        if not last:  # a hundredth stays with every component
            shares = (weights[:, None] * components.softmax(1)).sum(0)
            proposal.weights = 0.99 * shares + 0.01 / len(shares)
            proposal.weights = proposal.weights / proposal.weights.sum()
            mean = weights @ noise
            centered = (noise - mean) * weights[:, None].sqrt()
            if float(1.0 / weights.square().sum()) > 20 * len(mean):  # enough draws for their own covariance
                root = torch.linalg.cholesky(centered.T @ centered + 1e-6 * torch.eye(len(mean)).double())
                proposal.centers = torch.cat([proposal.centers, mean[None]])
                proposal.roots = torch.cat([proposal.roots, root[None]])
                proposal.weights = torch.cat([0.5 * proposal.weights, torch.tensor([0.5]).double()])
    effective = float(1.0 / weights.square().sum())
    value = float(log_weights.logsumexp(0)) - math.log(draws)
    return value, math.sqrt(1.0 / effective - 1.0 / draws), effective


def measure(seed: int, draws: int) -> dict[str, Any]:
    """Returns all estimates for one network."""
    torch.manual_seed(seed)
    training, data = spirals(200, 2 * seed), spirals(80, 2 * seed + 1)
    loader = fb.data.TensorLoader(*training, batch_size=32, shuffle=True)
    plain = fb.MLE(epochs=60, lr=1e-2).fit(
        fb.models.MLP(2, (WIDTH, WIDTH), 2), loader, seed=seed, progress=False
    )
    options: dict[str, Any] = {"structure": "full", "prior": "fixed", "prior_scale": PRIOR_SCALE}
    posterior = fb.calibrate(
        plain.model, data, candidates=["noise"], folds=0, seed=seed, progress=False, **options
    )
    chains = fb.diagnostics.noise_chains(posterior, data, seed=seed)
    gap = fb.diagnostics.elbo_gap(posterior, data, chains, samples=4000, seed=seed)
    tempered = fb.diagnostics.evidence(posterior, data, "tempered", chains, seed=seed)
    source = torch.Generator().manual_seed(seed)
    target = LogJoint(plain.model, *data)
    value, error, effective = importance_sampling(target, make_proposal(target, source), draws, source)
    noise = NoiseTarget(posterior, data, seed).draw(20_000)[0].double()
    entropy = 0.5 * float(torch.linalg.slogdet(2 * math.pi * math.e * noise.T.cov())[1])
    elbo = float(target.in_chunks(noise).mean()) + entropy
    return {
        "seed": seed,
        "rhat": chains.rhat,
        "elbo": gap.elbo,
        "gap": gap.nats,
        "gap error": gap.error,
        "bridge": gap.evidence.value,
        "bridge error": gap.evidence.error,
        "tempered": tempered.value,
        "tempered error": tempered.error,
        "independent": value,
        "independent error": error,
        "effective sample size": effective,
        "independent elbo": elbo,
        "independent gap": value - elbo,
    }


def main() -> None:
    parser = make_parser(__doc__, seeds=3, draws=200_000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        row = measure(seed, arguments.draws)
        rows.append(row)
        difference = row["bridge"] - row["independent"]
        error = math.hypot(row["bridge error"], row["independent error"])
        print(
            f"seed {seed}: log-evidence {row['bridge']:.3f} (bridge), {row['tempered']:.2f} (tempered) and "
            f"{row['independent']:.3f} (independent), difference {difference:+.3f} +- {error:.3f}; "
            f"gap {row['gap']:.2f}, independent {row['independent gap']:.2f}; R-hat {row['rhat']:.3f}",
            flush=True,
        )
        if arguments.out is not None:
            arguments.out.write_text(
                json.dumps({"torch": torch.__version__, "draws": arguments.draws, "rows": rows}, indent=1)
                + "\n"
            )


if __name__ == "__main__":
    main()
