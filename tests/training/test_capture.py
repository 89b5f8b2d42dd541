"""Steps that are recorded and replayed: what is refused, what compiles, and on a CUDA device that nothing else changes."""

import warnings

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.methods.fitting import Objective
from flowbnn.models import LeNet
from flowbnn.objectives import ELBO
from flowbnn.training import TrainingOptions
from flowbnn.training.cuda_graph import Recorder
from flowbnn.training.options import Clock

KINDS = {
    "gaussian": {"*": fb.noise.NormalAffine(base_scale=0.5)},
    "flow": {
        "conv2": fb.noise.NormalInvConv(base_scale=0.5),
        "fc1": fb.noise.NormalPlanar(base_scale=0.5),
        "*": fb.noise.NormalAffine(base_scale=0.5),
    },
}


def data(rows=40):
    source = torch.Generator().manual_seed(0)
    return torch.randn(rows, 1, 28, 28, generator=source), torch.randint(10, (rows,), generator=source)


MIXED = {  # every kind of noise, in as few graphs as hold them all
    "channel": {
        "2": fb.noise.NormalInvConv(),
        "5": fb.noise.NormalPlanar(1),
        "7": fb.noise.Dropout(0.1),
        "*": fb.noise.NormalAffine(),
    },
    "position": {
        "2": fb.noise.NormalInvConv(site="position"),
        "5": fb.noise.NormalAffine(components=3),
        "*": fb.noise.NormalAffine(site="position"),
    },
}


@pytest.mark.parametrize("kind", ["channel", "position"])
def test_a_training_step_with_noise_is_one_graph_without_a_break(kind):
    torch._dynamo.reset()
    network = nn.Sequential(nn.Conv2d(1, 3, 5, 5), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten())
    network.extend([nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 10)])
    model = fb.to_stochastic(network, MIXED[kind])
    objective = ELBO(fb.likelihoods.Categorical(), 100)

    def loss(outputs_of, batch, clock):
        scale = fb.objectives.warm_up(clock.progress, 0.5)
        terms = objective(model, batch[0], batch[1], scale, forward=outputs_of)
        return terms.loss, {}

    whole = Objective(model, fb.likelihoods.Categorical(), loss)

    def step(images, labels, shown):
        with torch.autocast("cpu", torch.bfloat16):
            return whole((images, labels), Clock(0, 0, 1, 1, shown, True))[0]

    # the way back is traced as well in tests/noise, in single precision
    compiled = torch.compile(step, backend="eager", fullgraph=True, dynamic=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of bf16 on a processor
        torch.manual_seed(1)
        found = compiled(*data(8), torch.tensor(0.25))
        found.backward()
    assert torch.isfinite(found)
    parameters = dict(model.named_parameters())
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in parameters.values())


def test_an_unknown_acceleration_is_refused():
    with pytest.raises(FlowBNNError, match="acceleration=.*'graph'"):
        TrainingOptions(acceleration="graf")


def test_where_steps_cannot_be_recorded_the_default_is_silent_and_a_wish_is_answered():
    loader = TensorLoader(*data(), batch_size=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fb.MLE(epochs=1).fit(LeNet(), loader, progress=False, accelerator="cpu")
    with pytest.warns(FlowBNNWarning, match="acceleration='graph' is not possible here .there is no CUDA"):
        fb.MLE(epochs=1).fit(LeNet(), loader, progress=False, accelerator="cpu", acceleration="graph")


def test_the_reasons_for_not_recording():
    objective = nn.Linear(1, 1)
    fused = torch.optim.Adam(objective.parameters(), fused=True)
    plain = torch.optim.Adam(objective.parameters())

    def reason(optimizer=fused, device="cuda", processes=1, **options):
        return Recorder.refusal(
            objective, optimizer, TrainingOptions(**options), torch.device(device), processes
        )

    assert "not marked capturable" in reason()
    objective.capturable = True
    assert reason() is None
    assert "fused=True" in reason(plain)
    assert "16-mixed" in reason(precision="16-mixed")
    assert "several processes" in reason(processes=2)
    assert "no CUDA" in reason(device="cpu")


on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def gpu(function):
    for mark in on_gpu:
        function = mark(function)
    return function


quiet = pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # so short a fit learns little


def fitted(acceleration, rules=None, rows=40, **options):
    torch.manual_seed(3)
    network = LeNet().cuda()
    images, labels = (tensor.cuda() for tensor in data(rows))
    loader = TensorLoader(images, labels, batch_size=16)
    given = {"epochs": 6, "progress": False, "acceleration": acceleration, "seed": 5, **options}
    if rules is None:
        return fb.MLE(epochs=given.pop("epochs"), schedule=falling).fit(network, loader, **given)
    return fb.fit(fb.to_stochastic(network, rules), loader, schedule=falling, **given)


def falling(optimizer, steps):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)


@gpu
def test_replayed_steps_end_where_steps_taken_one_by_one_end():
    """Also with a last batch of another size (8 of 40), which is taken by itself, and a rate that falls at every step."""
    plain, recorded = fitted("off"), fitted("graph")
    for (name, a), b in zip(plain.model.named_parameters(), recorded.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-5), name
    assert plain.history["loss"] == pytest.approx(recorded.history["loss"], abs=1e-4)
    assert recorded.history["learning_rate"] == plain.history["learning_rate"]


@gpu
@quiet
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("acceleration", ["graph", "compile"])
def test_noise_is_drawn_anew_at_every_replay_and_the_warm_up_goes_on(acceleration, precision):
    posterior = fitted(
        acceleration, KINDS["flow"], rows=64, epochs=12, warmup=0.5, noise_lr=1e-2, precision=precision
    )
    losses = posterior.history["loss"]
    assert len(set(losses)) == len(losses)
    assert losses[-1] < losses[0]
    assert posterior.history["kl"][-1] > 0
    assert all(torch.isfinite(p).all() for p in posterior.model.parameters())


@gpu
def test_a_loss_that_is_not_finite_is_traced_to_its_layer_and_the_weights_stay_good(tmp_path):
    images, labels = (tensor.cuda() for tensor in data(640))
    images[400:] = 3e38 * images[400:].sign()  # finite, but not what a convolution makes of it
    network = LeNet().cuda()
    loader = TensorLoader(images, labels, batch_size=16)
    with pytest.raises(FlowBNNError, match="not finite") as caught:
        fb.MLE(epochs=2).fit(network, loader, progress=False, acceleration="graph", checkpoint=tmp_path)
    assert "conv" in str(caught.value)
    assert all(bool(torch.isfinite(p).all()) for p in network.parameters())


@gpu
def test_a_wrong_label_is_refused_before_it_reaches_the_device():
    images, labels = (tensor.cuda() for tensor in data())
    labels[30] = 10
    with pytest.raises(FlowBNNError, match="labels run from 0 to 10"):
        fb.MLE(epochs=1).fit(
            LeNet().cuda(),
            TensorLoader(images, labels, batch_size=8),
            progress=False,
            acceleration="graph",
        )


@gpu
@quiet
def test_a_recorded_run_that_is_resumed_goes_on(tmp_path):
    fitted("graph", KINDS["gaussian"], epochs=3, checkpoint=tmp_path)
    posterior = fitted("graph", KINDS["gaussian"], epochs=6, checkpoint=tmp_path, resume=True)
    assert posterior.history.epochs == 6
