"""Tests of autoencoders, against the linear model whose likelihood and posterior have closed forms."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import flowbnn as fb
from flowbnn.density import Density
from flowbnn.density.fit import DensityObjective
from flowbnn.errors import FlowBNNError
from flowbnn.transforms import Amortized, Compose, LULinear, Residual, Sigmoid
from flowbnn.vae import VAE, load_autoencoder

TWO_EPOCHS = {"epochs": 2, "seed": 0, "progress": False, "accelerator": "cpu"}


def images(count: int = 32, side: int = 4) -> Tensor:
    """Returns random binary images."""
    return torch.rand(count, 1, side, side, generator=torch.Generator().manual_seed(0)).round()


def linear_model(posterior="gaussian", **kwargs) -> tuple[fb.vae.VAE, MultivariateNormal, Tensor]:
    """Returns probabilistic PCA, x = W z + noise of scale s, its exact p(x), and data."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    net = nn.Linear(2, 5, bias=False).double()
    net.weight.data.copy_(weight)
    vae = fb.vae.VAE(
        (5,), 2, encoder=nn.Identity(), decoder_net=net, decoder="gaussian", posterior=posterior, **kwargs
    ).double()
    scale = 0.5
    vae.decoder.log_scale.data.fill_(math.log(scale))
    exact = MultivariateNormal(
        torch.zeros(5, dtype=torch.float64),
        weight @ weight.T + scale**2 * torch.eye(5, dtype=torch.float64),
    )
    torch.manual_seed(2)
    return vae, exact, exact.sample((8,))


class Factor(fb.transforms.Transform):
    """Linear map with a fixed lower triangular matrix."""

    linearity = "affine"

    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.factor = nn.Parameter(factor)

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        log_det = self.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return z @ self.factor.mT, log_det.expand(z.shape[:-1])


def test_elbo_is_tight_at_exact_posterior() -> None:
    """The posterior N(S W'x / s^2, S), S = (I + W'W / s^2)^-1 = L L', is L times a normal with mean L'W'x / s^2."""
    weight = linear_model()[0].decoder_net.weight.data
    factor = torch.linalg.cholesky(
        torch.linalg.inv(torch.eye(2, dtype=torch.float64) + weight.T @ weight / 0.25)
    )
    vae, exact, x = linear_model(posterior=lambda dim, context: Amortized(Factor(factor), context))
    with torch.no_grad():
        vae.code.weight.zero_()
        vae.code.bias.zero_()
        vae.code.weight[:2] = factor.T @ weight.T / 0.25
    torch.testing.assert_close(vae.log_prob(x), exact.log_prob(x), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(vae.log_likelihood(x, samples=3), exact.log_prob(x), rtol=1e-8, atol=1e-8)


def test_importance_sampling_corrects_wrong_posterior() -> None:
    vae, exact, x = linear_model()
    with torch.no_grad():
        vae.code.weight.zero_()
        vae.code.bias.zero_()  # q is the prior
        elbo = torch.stack([vae.log_prob(x) for _ in range(200)]).mean(0)
    truth = exact.log_prob(x)
    assert (elbo < truth - 1.0).all()
    estimate = vae.log_likelihood(x, samples=200_000, rows=400_000)
    torch.testing.assert_close(estimate, truth, rtol=0, atol=0.1)


def test_closed_form_kl_equals_monte_carlo() -> None:
    vae, _, x = linear_model()
    closed = vae.terms(x[:2])[1]
    torch.manual_seed(0)
    z, log_q = vae.posterior(x[:2]).rsample_and_log_prob((4000,))
    draws = log_q - vae.prior_log_prob(z)
    error = draws.std(0) / math.sqrt(4000)
    assert ((draws.mean(0) - closed).abs() < 4 * error).all()


def test_posterior_with_elementwise_transform() -> None:
    vae, _, x = linear_model(posterior=lambda dim, context: Sigmoid())
    q = vae.posterior(x)
    torch.manual_seed(0)
    z = q.sample()
    torch.manual_seed(0)
    torch.testing.assert_close(vae.terms(x)[1], q.log_prob(z) - vae.prior_log_prob(z))


@pytest.mark.parametrize(
    "posterior", ["gaussian", "planar", "radial", "sylvester", "householder", "iaf", "coupling", "nsf"]
)
def test_every_posterior_trains_scores_and_samples(posterior: str) -> None:
    model = fb.vae.VAE((1, 4, 4), 3, hidden=(8,), posterior=posterior, length=2)
    trained = fb.vae.fit_autoencoder(model, images(), **TWO_EPOCHS)
    assert trained.history.epochs == 2
    score = trained.log_likelihood(images(4), samples=5)
    assert score.shape == (4,)
    assert score.isfinite().all()
    assert trained.log_likelihood(images(0)).shape == (0,)
    assert trained.sample(3, seed=0).shape == (3, 1, 4, 4)
    assert torch.equal(trained.sample(3, seed=0), trained.sample(3, seed=0))
    assert trained.interpolate(images(2), images(2), 4).shape == (4, 2, 1, 4, 4)
    changed = [
        name
        for (name, before), after in zip(model.named_parameters(), trained.parameters(), strict=True)
        if not torch.equal(before, after)
    ]
    assert any(name.startswith("flow.") for name in changed) == (posterior != "gaussian")


def test_flow_priors_and_contexts() -> None:
    labels = nn.functional.one_hot(torch.arange(32) % 3, 3).float()
    prior = fb.flows.RealNVP(3, context_dim=3, length=2, hidden=(8,))
    model = fb.vae.VAE((1, 4, 4), 3, hidden=(8,), prior=prior, context_dim=3, decoder="gaussian")
    trained = fb.vae.fit_autoencoder(model, images(), context=labels, validation=0, **TWO_EPOCHS)
    assert trained.log_likelihood(images(4), 5, labels[:4]).shape == (4,)
    assert trained.sample(4, labels[:4]).shape == (4, 1, 4, 4)
    draws = Density(trained).sample(5, labels[:4], seed=0)  # five for each row of the context
    expected = trained.sample(20, labels[:4].repeat(5, 1), seed=0)
    assert torch.equal(draws, expected.reshape(5, 4, 1, 4, 4))
    with pytest.raises(fb.FlowBNNError) as caught:
        trained.sample(5, labels[:4])
    assert (caught.value.kind, caught.value.argument) == ("shape", "context")


def test_samples_have_precision_of_weights() -> None:
    assert fb.vae.VAE((1, 4, 4), 2, hidden=(8,)).double().sample(3, mean=True).dtype == torch.float64


def test_codes_of_another_precision_are_decoded() -> None:
    model, codes = fb.vae.Autoencoder((1, 4, 4), 2, hidden=(8,)).double(), torch.randn(3, 2)
    torch.testing.assert_close(model.decode(codes), model.decode(codes.double()).float())
    assert model.decode(codes).dtype == torch.float32


def test_amortized_transform_declares_iterative_inverse() -> None:
    amortized = Amortized(Residual(2, hidden=(4,)), 3)
    assert (amortized.solver, amortized.cheap) == ("inverse", "forward")


def test_autoencoder_reconstructs() -> None:
    torch.manual_seed(0)
    data = torch.randn(64, 2) @ torch.randn(2, 6)  # of rank two, so two numbers are enough
    model = fb.vae.Autoencoder((6,), 2, hidden=(16,), decoder="gaussian")
    assert not model.lower_bound  # it has no density
    assert fb.vae.VAE((6,), 2, hidden=(16,)).lower_bound
    assert fb.fit_density(model, data, **TWO_EPOCHS).loc is None  # the data keep the units of the decoder
    options = TWO_EPOCHS | {"epochs": 150, "lr": 0.02, "batch_size": 64, "validation": 0}
    trained = fb.vae.fit_autoencoder(model, data, **options)
    assert (trained.reconstruct(data) - data).square().mean() < 0.1 * data.var()
    with pytest.raises(fb.FlowBNNError) as caught:
        trained.sample(2)
    assert caught.value.kind == "unsupported"


def test_encoder_reads_bytes_in_units_of_decoder() -> None:
    vae = fb.vae.VAE((2,), 1, hidden=(), decoder="logistic")
    assert vae.extract_features(torch.tensor([[0, 255]]), None).tolist() == [[-1.0, 1.0]]


@pytest.mark.parametrize("levels", [256, 1000])
def test_logistic_decoder_takes_bytes(levels) -> None:
    decoder, outputs = fb.vae.LogisticDecoder(levels), torch.zeros(2, 4)
    data = torch.tensor([[0, 255], [3, 128]])
    decoder.check(data.byte())
    torch.testing.assert_close(decoder.log_prob(outputs, data.byte()), decoder.log_prob(outputs, data))
    with pytest.raises(fb.FlowBNNError) as caught:
        decoder.check(data + levels - 255)
    assert (caught.value.kind, caught.value.argument) == ("data", "x")


def test_logistic_probabilities_sum_to_one_and_match_samples() -> None:
    decoder = fb.vae.LogisticDecoder(levels=5)
    torch.manual_seed(0)
    outputs = torch.tensor([[0.2, -1.5]], dtype=torch.float64)
    levels = torch.arange(5)[:, None]
    probabilities = decoder.log_prob(outputs.expand(5, 2), levels).exp()
    assert probabilities.sum().item() == pytest.approx(1, abs=1e-12)
    by_hand = torch.sigmoid((torch.tensor(2.5) - 2 * 1.2) / (2 * math.exp(-1.5))) - torch.sigmoid(
        (torch.tensor(1.5) - 2 * 1.2) / (2 * math.exp(-1.5))
    )
    assert probabilities[2].item() == pytest.approx(by_hand.item(), rel=1e-5)
    draws = decoder.sample(outputs.expand(20_000, 2))
    shares = (draws == torch.arange(5)).double().mean(0)
    assert ((shares - probabilities).abs() < 4 * (probabilities / 20_000).sqrt() + 1e-4).all()


@pytest.mark.parametrize("decoder_cls", [fb.vae.BernoulliDecoder, fb.vae.LogisticDecoder])
def test_log_prob_of_extreme_outputs_is_finite(decoder_cls) -> None:
    decoder = decoder_cls()
    outputs = (1e4 * torch.tensor([[1.0, -1.0]])).repeat(1, decoder.outputs_per_number).requires_grad_()
    x = torch.tensor([[0.0, 1.0]])
    value = decoder.log_prob(outputs, x)
    value.sum().backward()
    assert value.isfinite().all()
    assert outputs.grad.isfinite().all()


@pytest.mark.parametrize(
    ("call", "kind", "argument"),
    [
        (lambda: fb.vae.VAE((1, 4, 4), 2, posterior="planer"), "name", "posterior"),
        (
            lambda: fb.vae.VAE((1, 4, 4), 2, hidden=(8,)).log_prob(torch.zeros(3, 1, 5, 5)),
            "shape",
            "x",
        ),
        (
            lambda: fb.vae.VAE((1, 4, 4), 2, hidden=(8,), context_dim=3).log_prob(images(3)),
            "shape",
            "context",
        ),
        (
            lambda: fb.vae.VAE((1, 4, 4), 2, hidden=(8,), context_dim=3).log_prob(images(4), torch.arange(4)),
            "shape",
            "context",
        ),
        (
            lambda: fb.vae.VAE((1, 4, 4), 2, hidden=(8,), context_dim=3).log_prob(images(3), torch.arange(3)),
            "shape",
            "context",
        ),
        (lambda: fb.vae.VAE((1, 4, 4), 2, hidden=(8,)).reconstruct(images()[0]), "shape", "x"),
        (lambda: fb.vae.VAE((1, 4, 4), latent=2), "unknown setting", "latent"),
        (lambda: fb.vae.VAE((1, 4, 4), 2, zebra=2), "unknown setting", "zebra"),
        (
            lambda: fb.vae.fit_autoencoder(fb.vae.VAE((1, 4, 4), 2, hidden=(8,)), images(), epoch=3),
            "unknown setting",
            "epoch",
        ),
        (
            lambda: fb.vae.fit_autoencoder(fb.vae.VAE((1, 4, 4), 2, hidden=(8,)), images(), epochs=0),
            "value",
            "epochs",
        ),
        (
            lambda: fb.vae.fit_autoencoder(fb.vae.VAE((1, 4, 4), 2, hidden=(8,)), images(), validation=2),
            "value",
            "validation",
        ),
        (
            lambda: fb.vae.fit_autoencoder(
                fb.vae.VAE((1, 4, 4), 2, hidden=(8,)), 255 * images(), **TWO_EPOCHS
            ),
            "data",
            "x",
        ),
        (
            lambda: fb.vae.fit_autoencoder(
                fb.vae.VAE((1, 4, 4), 2, hidden=(8,), decoder="logistic"), 0.5 * images(), **TWO_EPOCHS
            ),
            "data",
            "x",
        ),
        (
            lambda: fb.vae.VAE((4,), 2, hidden=(8,), posterior=fb.flows.IAF),
            "value",
            "posterior",
        ),
        (
            lambda: fb.vae.VAE((4,), 2, hidden=(8,), posterior=lambda dim: None),
            "value",
            "posterior",
        ),
        (
            lambda: fb.vae.VAE((4,), 2, prior="nsf"),
            "value",
            "prior",
        ),
        (
            lambda: fb.vae.VAE((4,), 2, hidden=(8,), prior=fb.flows.MAF(3)),
            "shape",
            "prior",
        ),
        (
            lambda: fb.vae.VAE((4,), 2, hidden=(8,), prior=fb.flows.NSF(2, circular=True)),
            "shape",
            "prior",
        ),
        (lambda: fb.vae.GatedConvEncoder((1, 27, 27)), "shape", "shape"),
        (lambda: Amortized(LULinear(2), 3)(torch.zeros(1, 2)), "shape", "context"),
        (lambda: Amortized(Compose(LULinear(2), Sigmoid()), 3), "value", "transform"),
        (lambda: fb.vae.Autoencoder((), 2), "value", "shape"),
    ],
)
def test_bad_input_raises_an_error_of_one_line(call, kind, argument) -> None:
    with pytest.raises(fb.FlowBNNError) as caught:
        call()
    assert (caught.value.kind, caught.value.argument) == (kind, argument)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_training_step_can_be_compiled_with_progress_as_tensor() -> None:
    from flowbnn.training import Clock

    x = torch.randint(2, (5, 1, 4, 4), dtype=torch.uint8)
    model = fb.vae.VAE((1, 4, 4), 2, hidden=(4,), posterior="planar", length=2, warmup=0.5)
    objective = DensityObjective(Density(model), "likelihood")
    assert objective.capturable

    def step(progress, recording=True, epoch=0):
        return objective((x,), Clock(epoch, 0, 10, 5, progress, recording))

    results = []
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    for call in (
        lambda: compiled(torch.tensor(0.25)),
        lambda: step(0.25, False, 1),
        lambda: step(torch.tensor(9.0)),
    ):
        torch.manual_seed(0)
        results.append(call())
    torch.testing.assert_close(results[0][0], results[1][0])
    loss, logs = results[0]
    torch.testing.assert_close(loss, 0.5 * logs["kl"] - logs["reconstruction"])  # halfway through the warm-up
    torch.testing.assert_close(results[2][0], -logs["elbo"])
    assert not fb.vae.VAE((1, 4, 4), 2, hidden=(4,), prior=fb.flows.FFJORD(2)).capturable
    assert fb.flows.Glow((1, 4, 4), levels=1, hidden=(4,)).capturable
    # it draws the number of terms of a series
    assert not fb.flows.ResidualFlow((1, 4, 4), levels=1, hidden=(4,)).capturable
    with pytest.raises(fb.FlowBNNError) as caught:
        objective.check_batch((2 * x + 1,))
    assert (caught.value.kind, caught.value.argument) == ("data", "x")


def test_codes_and_densities_are_float32_under_autocast() -> None:
    model = fb.vae.VAE((1, 4, 4), 2, hidden=(8,), posterior="iaf", length=1)
    x = torch.rand(3, 1, 4, 4).round()
    with torch.autocast("cpu", torch.bfloat16):
        q = model.posterior(x)
        terms = [model.encode(x), *model.terms(x), model.decode(q.base.loc), q.base.scale, q.context]
    assert {term.dtype for term in terms} == {torch.float32}


def test_logistic_decoder_needs_two_levels() -> None:
    with pytest.raises(fb.FlowBNNError) as caught:
        fb.vae.LogisticDecoder(levels=1)
    assert caught.value.argument == "levels"


@pytest.mark.parametrize("model_cls", [fb.vae.Autoencoder, fb.vae.VAE])
@pytest.mark.parametrize("decoder", ["bernoulli", "logistic"])
def test_data_outside_support_of_decoder_raise(model_cls, decoder) -> None:
    """Without the check a Bernoulli decoder gives bytes log-likelihoods above zero."""
    model = model_cls((4,), 2, hidden=(4,), decoder=decoder)
    x = torch.tensor([[0.5, 200.5, 3.5, 7.5]])
    calls = [model.log_prob, Density(model).score, getattr(model, "log_likelihood", model.log_prob)]
    for call in calls:
        with pytest.raises(fb.FlowBNNError) as caught:
            call(x)
        assert (caught.value.kind, caught.value.argument) == ("data", "x")


def test_linear_autoencoder_and_options_that_its_fit_refuses():
    model = fb.vae.Autoencoder((4,), 2, hidden=())
    assert model.encode(torch.ones(3, 4)).tolist() == model.code(torch.ones(3, 4)).tolist()
    for option in ({"standardize": True}, {"objective": "flow-matching"}):
        with pytest.raises(fb.FlowBNNError) as caught:
            fb.vae.fit_autoencoder(model, torch.rand(8, 4), **TWO_EPOCHS, **option)
        assert caught.value.argument == next(iter(option))


def test_early_stopping_scores_the_loss_that_is_trained() -> None:
    """With beta 0 the KL divergence grows without bound, so the ELBO would restore an early epoch."""
    torch.manual_seed(0)
    data, held_out = images(64), images(16)
    vae = fb.vae.VAE((1, 4, 4), 2, hidden=(16,), beta=0.0)
    options = {"lr": 0.03, "patience": 20, "seed": 0, "progress": False, "accelerator": "cpu"}
    trained = fb.vae.fit_autoencoder(vae, data, validation=held_out, epochs=20, batch_size=16, **options)
    losses, elbos = trained.history["validation_loss"], trained.history["validation_nll"]
    assert elbos.index(min(elbos)) != losses.index(min(losses))
    torch.manual_seed(0)
    with torch.no_grad():
        reconstruction = trained.terms(held_out)[0].mean()
    assert min(losses) == pytest.approx(-float(reconstruction), rel=1e-5)


def test_saved_autoencoders_are_loaded_or_refused(tmp_path) -> None:
    vae = VAE((1, 4, 4), latent_dim=2, hidden=(8,), posterior="iaf", length=1)
    path = vae.save(tmp_path / "vae.safetensors")
    loaded = load_autoencoder(path, VAE((1, 4, 4), latent_dim=2, hidden=(8,), posterior="iaf", length=1))
    x = torch.ones(2, 1, 4, 4)
    assert torch.equal(loaded.encode(x), vae.encode(x))
    others = [
        VAE((1, 4, 4), latent_dim=3, hidden=(8,), posterior="iaf", length=1),
        VAE((1, 4, 4), latent_dim=2, hidden=(8,)),
    ]
    for other in others:
        with pytest.raises(FlowBNNError) as caught:
            load_autoencoder(path, other)
        assert caught.value.kind == "architecture"
    with torch.no_grad():
        vae.code.weight.fill_(torch.nan)
    with pytest.raises(FlowBNNError) as caught:
        load_autoencoder(vae.save(path), loaded)
    assert caught.value.kind == "not finite"
