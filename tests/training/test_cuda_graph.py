"""Tests of recorded training steps: obstacles, compilation, and equal results on a CUDA device."""

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


MIXED = {  # every kind of noise, in as few graphs as possible
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


@pytest.mark.parametrize("kind", ["channel", pytest.param("position", marks=pytest.mark.slow)])
def test_training_step_with_noise_compiles_to_one_graph(kind):
    torch._dynamo.reset()
    network = nn.Sequential(nn.Conv2d(1, 3, 5, 5), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten())
    network.extend([nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 10)])
    model = fb.to_stochastic(network, MIXED[kind])
    objective = ELBO(fb.likelihoods.Categorical(), 100)

    def loss(outputs_of, batch, clock):
        scale = fb.objectives.warm_up(clock.progress, 0.5)
        terms = objective(model, batch[0], batch[1], scale, forward=outputs_of)
        return terms.loss, {}

    training_objective = Objective(model, fb.likelihoods.Categorical(), loss)

    def step(images, labels, progress):
        with torch.autocast("cpu", torch.bfloat16):
            return training_objective((images, labels), Clock(0, 0, 1, 1, progress, True))[0]

    # tests/noise compiles the backward pass as well, in single precision
    compiled = torch.compile(step, backend="eager", fullgraph=True, dynamic=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about bf16 on a CPU
        torch.manual_seed(1)
        result = compiled(*data(8), torch.tensor(0.25))
        result.backward()
    assert torch.isfinite(result)
    parameters = dict(model.named_parameters())
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in parameters.values())


def test_requested_acceleration_that_is_not_possible_raises_a_warning():
    loader = TensorLoader(*data(), batch_size=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fb.MLE(epochs=1).fit(LeNet(), loader, progress=False, accelerator="cpu")
    with pytest.warns(FlowBNNWarning) as caught:
        fb.MLE(epochs=1).fit(LeNet(), loader, progress=False, accelerator="cpu", acceleration="graph")
    assert [(entry.message.kind, entry.message.argument) for entry in caught] == [
        ("acceleration", "acceleration")
    ]


def test_obstacles_to_recording():
    objective = nn.Linear(1, 1)
    fused = torch.optim.Adam(objective.parameters(), fused=True)
    plain = torch.optim.Adam(objective.parameters())

    def obstacle(optimizer=fused, device="cuda", num_processes=1, **options):
        return Recorder.obstacle(
            objective, optimizer, TrainingOptions(**options), torch.device(device), num_processes
        )

    assert "capturable" in obstacle()
    objective.capturable = True
    assert obstacle() is None
    assert "fused=True" in obstacle(plain)
    assert "16-mixed" in obstacle(precision="16-mixed")
    assert "processes" in obstacle(num_processes=2)
    assert "CUDA" in obstacle(device="cpu")


on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def gpu(function):
    for mark in on_gpu:
        function = mark(function)
    return function


ignore_warnings = pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # of short fits


def fitted(acceleration, rules=None, rows=40, **options):
    torch.manual_seed(3)
    network = LeNet().cuda()
    images, labels = (tensor.cuda() for tensor in data(rows))
    loader = TensorLoader(images, labels, batch_size=16)
    options = {"epochs": 6, "progress": False, "acceleration": acceleration, "seed": 5, **options}
    if rules is None:
        return fb.MLE(epochs=options.pop("epochs"), schedule=linear_decay).fit(network, loader, **options)
    return fb.fit(fb.to_stochastic(network, rules), loader, schedule=linear_decay, **options, validation=None)


def linear_decay(optimizer, steps):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)


@gpu
def test_replayed_steps_equal_unrecorded_steps():
    """The last batch has another size (8 of 40) and is not replayed, and the rate decays at every step."""
    plain, recorded = fitted("off"), fitted("graph")
    for (name, a), b in zip(plain.model.named_parameters(), recorded.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-5), name
    assert plain.history["loss"] == pytest.approx(recorded.history["loss"], abs=1e-4)
    assert recorded.history["learning_rate"] == plain.history["learning_rate"]


@gpu
@ignore_warnings
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("acceleration", ["graph", "compile"])
def test_every_replay_draws_new_noise_and_continues_the_warm_up(acceleration, precision):
    posterior = fitted(
        acceleration, KINDS["flow"], rows=64, epochs=12, warmup=0.5, noise_lr=1e-2, precision=precision
    )
    losses = posterior.history["loss"]
    assert len(set(losses)) == len(losses)
    assert losses[-1] < losses[0]
    assert posterior.history["kl"][-1] > 0
    assert all(torch.isfinite(p).all() for p in posterior.model.parameters())


@gpu
def test_nonfinite_loss_names_its_layer_and_leaves_the_weights_finite(tmp_path):
    images, labels = (tensor.cuda() for tensor in data(640))
    images[400:] = 3e38 * images[400:].sign()  # finite, but a convolution overflows
    network = LeNet().cuda()
    loader = TensorLoader(images, labels, batch_size=16)
    with pytest.raises(FlowBNNError) as caught:
        fb.MLE(epochs=2).fit(network, loader, progress=False, acceleration="graph", checkpoint=tmp_path)
    assert caught.value.kind == "not finite"
    assert "conv" in caught.value.layer
    assert all(bool(torch.isfinite(p).all()) for p in network.parameters())


@gpu
def test_invalid_labels_are_refused_before_they_reach_the_device():
    images, labels = (tensor.cuda() for tensor in data())
    labels[30] = 10
    with pytest.raises(FlowBNNError) as caught:
        fb.MLE(epochs=1).fit(
            LeNet().cuda(),
            TensorLoader(images, labels, batch_size=8),
            progress=False,
            acceleration="graph",
        )
    assert (caught.value.kind, caught.value.argument) == ("targets", "targets")


@gpu
@ignore_warnings
def test_recorded_runs_can_be_resumed(tmp_path):
    fitted("graph", KINDS["gaussian"], epochs=3, checkpoint=tmp_path)
    posterior = fitted("graph", KINDS["gaussian"], epochs=6, checkpoint=tmp_path, resume=True)
    assert posterior.history.epochs == 6
