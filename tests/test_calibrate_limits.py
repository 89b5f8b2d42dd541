"""fb.calibrate at its limits: narrow posteriors, priors of the rules, what it refuses; against closed forms."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal

import flowbnn as fb
from flowbnn.calibrate.flow import fit_flow
from flowbnn.errors import FlowBNNError
from flowbnn.methods.variational import natural
from flowbnn.noise import Dropout, NormalAffine, NormalPlanar
from flowbnn.noise.joint import independent_vectors

SCALE = 0.5


@pytest.mark.parametrize(("structure", "level"), [("full", 1e-4), ("factorized", 1e-6)])
def test_data_that_tell_the_noise_to_a_millionth_give_a_posterior_as_narrow(
    structure: str, level: float
) -> None:
    """Bounded log-scales ended at 3e-5; in a single dimension both structures are exact."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(50, 1, generator=source, dtype=torch.float64)
    y = 1.5 * x + level * torch.randn(50, 1, generator=source, dtype=torch.float64)
    network = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(network.weight)
    precision = float(x.square().sum()) / level**2 + 1.0 / SCALE**2
    mean = (float((x * y).sum()) / level**2 + 1.0 / SCALE**2) / precision
    given = {"likelihood": fb.likelihoods.Gaussian(level), "structure": structure, "prior": "fixed"}
    posterior = fb.calibrate(network, (x, y), folds=0, progress=False, **given)
    ((vector, _),) = independent_vectors(posterior.model)
    normal = vector.requires_grad_(False).posterior()
    assert float(normal.mean) == pytest.approx(mean, abs=0.05 * precision**-0.5)
    assert float(normal.stddev) == pytest.approx(precision**-0.5, rel=1e-3)
    evidence = MultivariateNormal(x[:, 0], level**2 * torch.eye(50).double() + SCALE**2 * x @ x.T)
    found = fb.diagnostics.pareto_k(posterior, (x, y), samples=50)
    if level == 1e-4:  # beyond, the exact evidence is lost in rounding
        assert found.elbo == pytest.approx(float(evidence.log_prob(y[:, 0])), abs=0.01)
    assert found.verdict == "good"
    with pytest.raises(fb.FlowBNNError, match=r"does not fit into float32.*float64"):
        fb.calibrate(
            network.float(),
            [(x.float(), y.float())],
            folds=0,
            **given | {"likelihood": fb.likelihoods.Gaussian(1e-8)},
        )


@pytest.mark.parametrize("structure", ["full", "factorized"])
def test_priors_of_the_rules_are_those_of_the_posterior(structure: str) -> None:
    """Layers beside each other that no data tell of: the posterior is the prior of the rules, of each layer its own."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 1), nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(0.0 * x[:, :2]) + self.two(0.0 * x[:, :1])

    normal = fb.noise.NormalAffine
    rules = {"one": normal(prior_scale=0.2, prior_loc=0.9), "two": normal(prior_scale=2.0)}
    given = {"likelihood": fb.likelihoods.Gaussian(1.0), "prior": "fixed", "folds": 0, "progress": False}
    data = [(torch.ones(30, 2), torch.zeros(30, 1))]
    posterior = fb.calibrate(Two(), data, rules=rules, structure=structure, **given)
    priors, draws = {}, posterior.draws(4000, seed=0)
    for vector, names in independent_vectors(posterior.model):
        some = zip(
            names,
            vector.prior.scale.split([2, 1] if structure == "full" else [len(vector.prior.scale)]),
            strict=True,
        )
        priors |= dict(some)
    assert priors["one"].tolist() == pytest.approx([0.2, 0.2])
    assert priors["two"].tolist() == pytest.approx([2.0])
    assert draws["one"].mean() == pytest.approx(0.9, abs=0.02)
    assert draws["one"].std() == pytest.approx(0.2, rel=0.1)
    assert draws["two"].std() == pytest.approx(2.0, rel=0.1)
    for wrong, text in (({"prior_scale": 1.0}, "given twice"), ({"structure": "chain"}, "several")):
        other = rules | ({"two": normal(side="output")} if "structure" in wrong else {})
        with pytest.raises(fb.FlowBNNError, match=text):
            fb.calibrate(Two(), data, rules=other, **given | wrong)


def test_a_network_in_other_units_than_its_targets_is_warned_of_and_left_alone() -> None:
    x = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    network = nn.Linear(2, 1)
    with pytest.warns(fb.FlowBNNWarning, match="other units"):
        posterior = fb.calibrate(
            network, [(x, 1000.0 * network(x).detach() + 5000.0)], folds=0, progress=False
        )
    plain = fb.to_deterministic(posterior.model)
    assert torch.equal(plain(x), network(x))
    assert not [name for name, _ in posterior.model.named_buffers() if "flowbnn" in name]


@pytest.mark.parametrize("folds", [0, 2])
def test_the_comparison_is_saved_with_the_posterior(folds: int, tmp_path: Path) -> None:
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    data = [(x, (x.sum(1) + torch.linspace(-2, 2, 40) > 0).long())]
    network = nn.Linear(2, 2, bias=False).requires_grad_(False)
    network.weight.copy_(torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
    posterior = fb.calibrate(network, data, prior="fixed", folds=folds, progress=False)
    again = type(posterior).load(posterior.save(tmp_path / "one.safetensors"), network)
    assert str(again.calibration) == str(posterior.calibration)
    assert again.calibration == posterior.calibration
    assert (posterior.calibration.gain is None) == (folds == 0)
    assert not posterior.calibration.better
    older = {name: value for name, value in vars(again.calibration).items() if name != "flow"}
    assert type(again.calibration)(**older) == posterior.calibration


@pytest.mark.filterwarnings("ignore:the held-out data are all predicted right:flowbnn.FlowBNNWarning")
def test_one_example_is_told_in_the_singular() -> None:
    data, network = [(torch.ones(1, 2), torch.tensor([0]))], nn.Linear(2, 2)
    with pytest.warns(fb.FlowBNNWarning, match="by 1 held-out example; give at least 20"):
        posterior = fb.calibrate(network, data, prior="fixed", progress=False)
    assert str(posterior.calibration).endswith(" 2 dimensions, fixed prior, 1 held-out example")
    assert "1 layer with noise" in repr(posterior)


def test_targets_that_the_network_gives_exactly_leave_a_noise_level() -> None:
    x = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    network = nn.Linear(2, 1).requires_grad_(False)
    posterior = fb.calibrate(network, [(x, network(x))], folds=0, prior="fixed", progress=False)
    level = posterior.likelihood.log_scale.detach().exp() / network(x).std()
    assert 5e-5 < float(level) < 1e-3
    assert float(posterior.predict(x, 32, seed=0).nll(network(x)).mean()) < 0.0


def test_a_network_that_mixes_the_rows_of_a_batch_is_refused() -> None:
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    data = [(x, (x.sum(1) > 0).long())]
    given = {"likelihood": fb.likelihoods.Categorical(), "folds": 0, "progress": False}

    def network(tracks: bool) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=tracks), nn.Linear(4, 2))

    with pytest.raises(fb.FlowBNNError, match="depends on the other examples") as told:
        fb.calibrate(network(False), data, **given)
    assert told.value.kind == "network"
    model = fb.to_stochastic(network(False), {"*": fb.noise.NormalAffine()})
    with pytest.raises(fb.FlowBNNError, match="depends on the other examples"):
        fb.diagnostics.pareto_k(fb.posterior.NoisePosterior(model, given["likelihood"]), data)
    fb.calibrate(network(True), data, **given)


@pytest.mark.parametrize(("dim", "solved", "away"), [(3, 512, 0.2), (60, 2, 0.6)])
def test_the_mean_of_a_factorized_gaussian_arrives_where_inputs_are_correlated(
    dim: int, solved: int, away: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the diagonal of the curvature alone it ended 17 standard deviations away, and beyond 512 dimensions still did."""
    monkeypatch.setattr(natural, "SOLVED", solved)
    source = torch.Generator().manual_seed(1)
    x = torch.randn(300, dim, generator=source, dtype=torch.float64)
    x[:, 1::3] = 0.95 * x[:, ::3] + 0.3 * x[:, 1::3]
    network = nn.Linear(dim, 1, bias=False, dtype=torch.float64).requires_grad_(False)
    nn.init.ones_(network.weight)
    y = (
        x @ torch.tensor([[1.4], [0.6], [0.8]]).double().repeat(dim // 3, 1)
        + 0.01 * torch.randn(300, 1, generator=source).double()
    )
    precision = x.T @ x / 0.01**2 + torch.eye(dim).double() / SCALE**2
    mean = torch.linalg.solve(precision, x.T @ y[:, 0] / 0.01**2 + 1.0 / SCALE**2)
    likelihood = fb.likelihoods.Gaussian(0.01)
    given = {"structure": "factorized", "prior": "fixed", "folds": 0, "progress": False}
    posterior = fb.calibrate(network, [(x, y)], likelihood=likelihood, **given)
    ((vector, _),) = independent_vectors(posterior.model)
    normal = vector.requires_grad_(False).posterior()
    assert float(((normal.mean - mean) * precision.diagonal().sqrt()).abs().max()) < away
    torch.testing.assert_close(normal.stddev, precision.diagonal().rsqrt(), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("solved", [512, 2])  # by a matrix, and by conjugate gradients
def test_a_step_divides_by_the_whole_curvature_and_a_share_of_its_roots_stands_for_all(
    solved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(natural, "SOLVED", solved)
    source = torch.Generator().manual_seed(0)
    roots = torch.randn(20, 6, generator=source, dtype=torch.float64)
    slope, added = torch.randn(2, 6, generator=source, dtype=torch.float64).abs()
    whole = 2.0 * roots.T @ roots  # every root is there twice, and one of the two is kept
    zero = torch.zeros(())
    estimate = natural.Estimate(zero, 0.0, slope, [whole.diagonal()], [], zero, list(roots.split(7)))
    truth = torch.linalg.solve(whole + added.diag(), slope)
    torch.testing.assert_close(natural._newton(estimate, added, slope), truth, rtol=1e-4, atol=1e-6)


def test_data_that_are_all_predicted_right_are_told_of_once_and_not_in_every_fold() -> None:
    x = torch.linspace(-1.0, 1.0, 40)[:, None]
    network = nn.Linear(1, 2)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[-5.0], [5.0]]))
        network.bias.zero_()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fb.calibrate(network, [(x, (x[:, 0] > 0).long())], folds=4, progress=False)
    assert [one.message.fields["kind"] for one in told] == ["memorised"]  # type: ignore[union-attr]


class Beside(nn.Module):
    """Three layers beside each other: linear in the noise of all, which the first and the last share inputs of."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(2, 1, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x[:, :2]) + self.two(x[:, 2:4]) + self.three(x[:, 4:])


def test_a_chain_is_the_best_one_where_layers_that_are_no_neighbours_are_correlated() -> None:
    torch.manual_seed(0)
    network, inputs = Beside().double(), torch.randn(15, 6).double() @ (torch.eye(6) + 0.4).double()
    design = inputs * torch.cat([layer.weight for layer in network.children()], 1).detach()
    exact = design.mT @ design / 0.3**2 + torch.eye(6) / SCALE**2
    fit = natural.fit_gaussian(
        fb.to_stochastic(network, {"*": fb.noise.NormalAffine()}),
        fb.likelihoods.Gaussian(0.3),
        inputs,
        design.sum(1, keepdim=True),
        "chain",
        prior="fixed",
        scale=SCALE,
    )

    def divergence(covariance: torch.Tensor) -> torch.Tensor:
        """To the exact posterior, whose mean is that of the prior, from a Gaussian of the same mean."""
        return 0.5 * ((exact @ covariance).trace() - 6.0 - torch.logdet(exact @ covariance))

    # a triangular root of the precision, of the shape of a chain's
    free = torch.eye(6, dtype=torch.float64).requires_grad_()
    shape = torch.ones(6, 6).tril()
    shape[4:, :2] = 0.0

    def loss() -> torch.Tensor:
        root = free * shape
        return divergence(torch.linalg.inv(root.mT @ root))

    search = torch.optim.LBFGS([free], max_iter=300, line_search_fn="strong_wolfe")

    def again() -> torch.Tensor:
        search.zero_grad()
        value = loss()
        value.backward()
        return value

    search.step(again)
    assert float(divergence(fit.gaussian.covariance())) == pytest.approx(loss().item(), abs=2e-3)
    torch.testing.assert_close(fit.gaussian.mean, torch.ones(6).double(), rtol=0, atol=0.02)


def test_one_logit_may_be_squeezed() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(240, 2)
    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    given = {"folds": 0, "prior": "fixed", "progress": False, "accelerator": "cpu"}
    data = [(inputs[:40], torch.arange(40) % 2)]
    networks = network, nn.Sequential(*network, nn.Flatten(0))
    rows, flat = (fb.calibrate(one, data, **given) for one in networks)
    assert flat.history[-1] == rows.history[-1]
    assert fb.diagnostics.pareto_k(flat, data, 50) == fb.diagnostics.pareto_k(rows, data, 50)
    assert torch.equal(*(one.predict(inputs, seed=0).probabilities for one in (rows, flat)))


def test_rules_that_are_not_gaussian_are_told_which_settings_to_leave_out() -> None:
    for recipe in (NormalAffine(prior_df=4.0), NormalAffine(components=2), NormalPlanar()):
        with pytest.raises(
            FlowBNNError, match=r"NormalAffine\(\) without components, prior_df, base_df and site="
        ) as told:
            fb.calibrate(
                nn.Linear(3, 2),
                (torch.randn(30, 3), torch.arange(30) % 2),
                rules={"*": recipe},
                progress=False,
            )
        assert told.value.kind == "rules"


class Root(nn.Module):
    """The square root of 1.05 - z: not a number under wider noise."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(1, 1, bias=False), nn.Linear(3, 2)
        nn.init.ones_(self.one.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(x) * (1.05 - self.one(torch.ones_like(x[:, :1]))).sqrt()


def test_likelihoods_that_are_not_numbers_are_one_line() -> None:
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    data = [(x, (x.sum(1) > 0).long())]
    with pytest.raises(FlowBNNError, match="not finite under narrow noise.*by the rules") as told:
        fb.calibrate(Root(), data, folds=0, progress=False)
    assert told.value.kind == "not finite"
    posterior = fb.calibrate(Root(), data, rules={"two": NormalAffine()}, folds=0, progress=False)
    assert posterior.predict(x, 4).probabilities.isfinite().all()
    wide = fb.posterior.NoisePosterior(fb.to_stochastic(Root(), {"*": NormalAffine()}), posterior.likelihood)
    with pytest.raises(FlowBNNError, match=r"not finite at \d+ of 400 draws"):
        fb.diagnostics.pareto_k(wide, data)
    network = Root()
    for broken in (network, posterior.model):
        nn.init.constant_(broken.two.weight, float("nan"))
    with pytest.raises(FlowBNNError, match="gives NaN for the first examples"):
        fb.diagnostics.pareto_k(posterior, data)
    with pytest.raises(FlowBNNError, match="gives NaN for the first examples"):
        fb.calibrate(network, data, folds=0, progress=False)


def test_a_fit_that_does_not_settle_is_told() -> None:
    """Logits in the tens of thousands: every step loses, and the noise stays where it began."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(100, 8, generator=source)
    labels = (x.sum(1) + torch.randn(100, generator=source) > 0).long()
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).requires_grad_(False)
    network[2].weight.mul_(1e5)
    with pytest.warns(fb.FlowBNNWarning, match="has not settled after 60 passes") as told:
        fb.calibrate(network, [(x, labels)], prior="fixed", folds=0, progress=False)
    assert "settled" in [one.message.fields["kind"] for one in told]


@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")
@pytest.mark.parametrize(("count", "folds"), [(1, 0), (3, 0), (5, 2)])
def test_the_report_has_the_folds_that_there_were(count: int, folds: int) -> None:
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(0))
    report = fb.calibrate(nn.Linear(2, 2), [(x, torch.arange(count) % 2)], progress=False).calibration
    assert (report.folds, bool(report.nll)) == (folds, folds > 0)


@pytest.mark.parametrize("structure", ["full", "factorized"])
@pytest.mark.parametrize("flow", [Dropout(), Dropout(site="channel"), NormalAffine(), "gaussian"], ids=str)
def test_noise_without_a_flow_is_refused_as_one(flow, structure: str) -> None:
    data = [(torch.randn(30, 2), torch.zeros(30, dtype=torch.long))]
    with pytest.raises(FlowBNNError, match=r"has no flow .* take flow='nsf' .* or leave flow out") as refused:
        fb.calibrate(nn.Linear(2, 2), data, flow=flow, structure=structure, folds=0, progress=False)
    assert refused.value.argument == "flow"


@pytest.mark.parametrize("flow", ["nsf", "planar"])
def test_the_flow_of_each_layer_begins_at_its_gaussian(flow: str, monkeypatch) -> None:
    monkeypatch.setitem(fit_flow.__kwdefaults__, "steps", 0)
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    network = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).requires_grad_(False)
    data = [(x, network(x) + 0.3 * torch.randn(40, 1))]
    given = {"structure": "factorized", "prior": "fixed", "folds": 0, "progress": False}
    report = fb.calibrate(network, data, flow=flow, **given).calibration
    assert abs(report.flow_gain) < 0.2 + 3 * report.flow_error
