"""Named flows of images: probabilities, contexts, shapes and bad input."""

import pytest
import torch

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.nets import ConditionalNormal
from flowbnn.transforms import Augment, ChannelsFirst, Compose


def perturb(flow: fb.flows.FlowModel, size: float = 0.1) -> fb.flows.FlowModel:
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter += size * torch.randn_like(parameter)
    return flow.eval()


NAMES = pytest.mark.parametrize("name", ["Glow", "ResidualFlow"])


def small(name: str, **options) -> fb.flows.FlowModel:
    torch.manual_seed(0)
    flow = getattr(fb.flows, name)((1, 4, 4), length=1, levels=2, hidden=(4,), values=None, **options)
    return perturb(flow.double())


def flatten_latents(flow: fb.flows.FlowModel, x: torch.Tensor) -> torch.Tensor:
    """Returns all latents of an image in one vector, with the channels that are split off standardized: a deterministic bijection."""
    latents = []
    steps = [step for each in flow.transform for step in (each if isinstance(each, Compose) else [each])]
    for step in reversed(steps):
        if isinstance(step, Augment):
            z, e = x[..., : step.dim], x[..., step.dim :]
            noise = step.noise(z)
            latents.append(((e - noise.loc) / noise.scale).flatten())
            x = z
        else:
            x = step.inverse(x)[0]
    return torch.cat([x.flatten(), *latents])


@NAMES
def test_density_of_an_image_equals_that_of_its_jacobian(name: str) -> None:
    flow, x = small(name), torch.randn(1, 4, 4).double()
    jacobian = torch.func.jacrev(lambda image: flatten_latents(flow, image))(x).reshape(16, 16)
    z = flatten_latents(flow, x)
    expected = (
        torch.distributions.Normal(0.0, 1.0).log_prob(z).sum() + torch.linalg.slogdet(jacobian).logabsdet
    )
    torch.testing.assert_close(flow().log_prob(x), expected, rtol=1e-7, atol=1e-7)


@NAMES
def test_density_of_drawn_images_equals_that_of_the_forward_pass(name: str) -> None:
    flow = small(name, context_dim=3)
    context = torch.randn(5, 3).double()
    x, log_prob = flow(context).rsample_and_log_prob()
    assert x.shape == (5, 1, 4, 4)
    torch.testing.assert_close(flow(context).log_prob(x), log_prob)
    assert not torch.allclose(flow(context + 1.0).log_prob(x), log_prob)
    assert flow(context).sample((2,)).shape == (2, 5, 1, 4, 4)


def test_integer_pixels() -> None:
    flow = fb.flows.Glow((1, 4, 4), length=1, levels=2, hidden=(4,), values=4)
    x = flow().sample((6,))
    assert x.dtype == torch.long
    assert 0 <= x.min() <= x.max() <= 3
    log_prob = flow().log_prob(x.to(torch.uint8))
    log_prob.sum().backward()
    assert log_prob.isfinite().all()
    assert flow.transform.lower_bound
    assert flow().log_prob(torch.full((1, 4, 4), 4)) == -torch.inf


def test_weights_of_a_flow_without_logit_do_not_load() -> None:
    flow = fb.flows.Glow((1, 4, 4), length=1, levels=2, hidden=(4,))
    state = {name: value for name, value in flow.state_dict().items() if "margin" not in name}
    assert len(state) == len(flow.state_dict()) - 1
    with pytest.raises(RuntimeError) as caught:
        flow.load_state_dict(state)
    assert "margin" in str(caught.value)


def test_empty_batch_of_images() -> None:
    flow = fb.flows.FlowPP((1, 4, 4), length=1, levels=1, hidden=(4,), values=4)
    assert flow().log_prob(torch.zeros(0, 1, 4, 4, dtype=torch.long)).shape == (0,)


def test_learned_dequantization_bounds_the_probability_of_every_image() -> None:
    """Compares importance weights of the bound with counts of draws, for all 16 images of four bits."""
    torch.manual_seed(0)
    flow = perturb(fb.flows.FlowPP((1, 2, 2), 2, length=2, hidden=(4,), levels=1, values=2, components=2))
    with torch.no_grad():
        for module in flow.modules():  # weights of narrow noise have infinite variance
            if isinstance(module, ConditionalNormal):
                module.net.last.bias[1:] += 1.0
    images, context, count = (
        torch.cartesian_prod(*[torch.arange(2)] * 4).view(16, 1, 2, 2),
        torch.ones(2),
        4000,
    )
    with torch.no_grad():
        log_prob = flow(context).log_prob(images.expand(count, 16, 1, 2, 2))
        z = flow(context).base.sample((10 * count,))
        x = ChannelsFirst()(flow.transform[1](flow.transform[0](z, context)[0])[0])[0]
    inside = ((x >= 0) & (x < 1)).flatten(1).all(1)
    same = ((2 * x).floor().unsqueeze(1) == images).flatten(2).all(-1) & inside.unsqueeze(-1)
    weights, shares = log_prob.exp(), same.float()
    error = (weights.var(0) / count + shares.var(0) / (10 * count)).sqrt()
    assert ((weights.mean(0) - shares.mean(0)).abs() < 5 * error + 1e-9).all()
    assert shares.sum(0).min() > 5
    assert (log_prob.mean(0) < weights.mean(0).log()).all()


@pytest.mark.parametrize(
    ("call", "kind", "argument"),
    [
        (lambda: fb.flows.Glow((1, 6, 4), levels=2), "shape", "shape"),
        (lambda: fb.flows.Glow((4, 4)), "shape", "dim"),
        (lambda: fb.flows.Glow((1, 4, 4), levels=1)().log_prob(torch.rand(1, 4, 4)), "dtype", None),
        (
            lambda: fb.flows.Glow((1, 4, 4), levels=1, values=None)().log_prob(torch.ones(1, 4, 4).long()),
            "dtype",
            None,
        ),
    ],
)
def test_bad_input_raises(call, kind: str, argument: str | None) -> None:
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert (caught.value.kind, caught.value.argument) == (kind, argument)
    assert "\n" not in str(caught.value)
