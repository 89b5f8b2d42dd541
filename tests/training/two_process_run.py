"""Trains several small networks, in one process or in several, and stores the result of each process.

test_distributed_run.py runs this file as a script in two processes, ``two_process_run.py FOLDER``. They also run a study, and at the
end the second process is killed in the middle of a fit.
"""

import contextlib
import os
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.methods import PointPosterior
from flowbnn.training import EarlyStop, TrainingOptions, connect, save_tensors

sys.path.insert(0, str(Path(__file__).parent))
from failing_fit import fit as failing_fit
from objectives import train

FLOWS = {
    "0": fb.noise.NormalPlanar(2, site="position"),
    "3": fb.noise.Dropout(0.3),
    "6": fb.noise.NormalInvConv(),
    "*": fb.noise.NormalAffine(),
}


def images(rows, seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 1, 8, 8, generator=source), torch.randint(3, (rows,), generator=source)


def convolutions():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout2d(0.2), nn.Conv2d(4, 4, 3, bias=False), nn.Tanh()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


def shuffled(rows=29, batch=8, workers=0):
    return DataLoader(TensorDataset(*images(rows)), batch_size=batch, shuffle=True, num_workers=workers)


def flow_noise(**options):
    """Fits every kind of noise with uneven shards (29 examples in batches of 8), validation and early stopping."""
    model = fb.to_stochastic(convolutions(), FLOWS)
    rule = EarlyStop(patience=9)
    defaults = {"validation": shuffled(11, 4), "early_stop": rule, "warmup": 0.5, "gamma": 0.01}
    return fb.fit(model, shuffled(), weight_lr=1e-3, noise_lr=1e-2, **defaults, **options)


def two_samples_of_a_mixture(**options):
    """Fits two samples per example, a mixture base and learned observation noise, with a last batch of one example."""
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    rules = {"0": fb.noise.NormalAffine(components=3), "*": fb.noise.NormalGlow(1)}
    inputs = torch.randn(17, 3, generator=torch.Generator().manual_seed(2))
    loader = TensorLoader(inputs, inputs.sum(1, keepdim=True), batch_size=8, shuffle=True)
    return fb.fit(
        fb.to_stochastic(network, rules), loader, repeats=2, clip_gradient=0.5, **options, validation=None
    )


def device_batches(**options):
    """Fits a deterministic network with a loader of tensors in memory."""
    loader = TensorLoader(
        *images(22), batch_size=10, shuffle=True, generator=torch.Generator().manual_seed(3)
    )
    return fb.MAP(epochs=options.pop("epochs", 20), prior_scale=(0.01 * 22) ** -0.5).fit(
        convolutions(), loader, **options
    )


def statistics(**options):
    """Fits BatchNorm, whose statistics differ between processes on a CPU."""
    torch.manual_seed(4)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    return fb.MLE(epochs=options.pop("epochs", 20)).fit(network, shuffled(24), **options)


def data_workers(**options):
    """Fits with a data worker, and a list of batches for validation."""
    model = fb.to_stochastic(convolutions(), {"*": fb.noise.NormalAffine(site="position")})
    return fb.fit(model, shuffled(16, workers=1), validation=[images(5, 7), images(3, 8)], **options)


def own_step(epochs, **options):
    """Trains a custom objective with a layer that is used in some batches and one that is never used."""
    torch.manual_seed(5)
    network = nn.ModuleDict({name: nn.Linear(64, 3) for name in ("used", "rare", "idle")})
    network.register_parameter("scale", nn.Parameter(torch.zeros(())))

    def step(layers, batch, clock):
        inputs, targets = batch
        outputs = layers["used"](inputs.flatten(1)) * layers.scale.exp()
        if bool((targets == 2).any()):
            outputs = outputs + layers["rare"](inputs.flatten(1)) * (targets == 2)[:, None]
        loss = nn.functional.cross_entropy(outputs, targets)
        return loss, {"rows": float(len(targets))}

    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    history = train(network, step, optimizer, shuffled(13, 5), TrainingOptions(epochs, **options))
    assert network["idle"].weight.grad is None
    return PointPosterior(network, fb.likelihoods.Categorical(), history)


def interrupted(folder, **options):
    """Fits with an interruption in the middle of an epoch, which leaves no difference."""
    del options["epochs"], options["seed"], options["progress"], options["accelerator"]
    with contextlib.suppress(KeyboardInterrupt):
        failing_fit(folder / "cut", "interrupted", **options)
    resumed = failing_fit(folder / "cut", resume=True, **options)
    expected = failing_fit(folder / "expected", **options)
    left, right = (posterior.model.state_dict() for posterior in (resumed, expected))
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert resumed.history.records == expected.history.records
    return resumed


def gaussian_weights(epochs, **options):
    """Fits Bayes by Backprop, with one draw of the weights for all processes and local noise for every row."""
    method = fb.BayesByBackprop("scale-mixture", epochs=epochs, lr=1e-2)
    return with_buffers(method.fit(convolutions(), shuffled(), **options))


def flipped_weights(epochs, **options):
    """Fits Flipout, which draws signs for every row."""
    method = fb.BayesByBackprop(epochs=epochs, lr=1e-2, estimator="flipout")
    return with_buffers(method.fit(convolutions(), shuffled(), **options))


def multiplied_weights(epochs, **options):
    """Fits multiplicative normalizing flows, which draw noise for every row."""
    return with_buffers(fb.MNF(epochs=epochs, lr=1e-2).fit(convolutions(), shuffled(), **options))


def with_buffers(posterior):
    """Returns the posterior with its tensors registered as buffers of its network."""
    for number, value in enumerate(posterior.state().values()):
        posterior.model.register_buffer(f"posterior{number}", value)
    return posterior


CASES = (
    flow_noise,
    two_samples_of_a_mixture,
    device_batches,
    statistics,
    data_workers,
    own_step,
    gaussian_weights,
    flipped_weights,
    multiplied_weights,
)


def predictions(posterior, folder, rank):
    """Stores predictions for loaders of every kind, with shared and with separate draws."""
    held_out = images(17, 5)
    loaders = {
        "ordered": DataLoader(TensorDataset(*held_out), batch_size=4),
        "shuffled": DataLoader(TensorDataset(*held_out), batch_size=4, shuffle=True),
        "list": [tuple(tensor[i : i + 4] for tensor in held_out) for i in range(0, 17, 4)],
        "single": [held_out],
        "bare": [held_out[0][:9], held_out[0][9:]],
    }
    tensors = {}
    for name, loader in loaders.items():
        for shared in (True, False):
            torch.manual_seed(6 + rank)  # all processes use the draws of the first one
            prediction, targets = posterior.predict_with_targets(loader, 6, shared=shared, progress=False)
            tensors[f"{name} {shared}"] = prediction.probabilities
            if targets is not None:
                tensors[f"{name} {shared} targets"] = targets
    adaptive = posterior.predict(loaders["ordered"], 40, adaptive=0.05, progress=False)
    tensors |= {"adaptive": adaptive.probabilities, "sample counts": adaptive.sample_counts}
    inputs = [held_out, (torch.full_like(held_out[0], torch.nan), held_out[1])]
    try:
        posterior.predict(inputs[rank : rank + 1] * 2, 2, progress=False, shared=False)
    except FlowBNNError as error:
        tensors[f"error of kind {error.kind}"] = torch.zeros(1)
    local = posterior.predict(held_out[0][: 3 + rank], 2, seed=1)  # a tensor is not split
    tensors["tensor"] = local.probabilities[:3]
    save_tensors(folder / f"predictions-{rank}.safetensors", tensors, {})


def train_all(folder):
    rank = 0
    for case in (*CASES, partial(interrupted, folder)):
        name = getattr(case, "__name__", "interrupted")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", FlowBNNWarning)
            posterior = case(seed=3, epochs=2, progress=False, accelerator="cpu")
        if torch.distributed.is_initialized():
            rank = torch.distributed.get_rank()
        history = posterior.history.to_dict() | {"seconds": 0.0}
        kinds = [warning.message.kind for warning in caught if isinstance(warning.message, FlowBNNWarning)]
        document = {"history": history, "random": torch.rand(2).tolist()}
        document["warnings"] = [kind for kind in kinds if kind == "batch norm"]
        tensors = dict(posterior.model.state_dict()) | {
            f"likelihood.{name}": value for name, value in posterior.likelihood.state_dict().items()
        }
        save_tensors(folder / f"{name}-{rank}.safetensors", tensors, document)
        if case is flow_noise:
            predictions(posterior, folder, rank)


def fail(folder):
    """Runs a fit in children of both processes, which connect by a file. The second child fails and the first one reports it."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        folder.mkdir(exist_ok=True)
        address = f"file://{folder.absolute() / 'rendezvous'}"
        torch.distributed.init_process_group("gloo", address, rank=int(os.environ["RANK"]), world_size=2)
        failing_fit(folder / "failing", "raises", devices=2)
    except ArithmeticError:
        os._exit(0)
    except FlowBNNError as error:
        (folder / "message.txt").write_text(f"{error.kind}: {error}")
    os._exit(0)


def run_study(folder):
    from flowbnn_studies.cli import app

    if torch.distributed.get_rank() == 0:
        print("--- output of the study", flush=True)
    command = ["run", "two-clusters", "--quick", "--seeds", "1", "--epochs", "1", "--devices", "2"]
    settings = ["--set", "train=80", "--set", "test=80", "--set", "samples=2", "--set", "grid=3"]
    app([*command, *settings, "--out", str(folder)], standalone_mode=False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    output = Path(sys.argv[1])
    import torch._dynamo  # torch's optimizers import it later, which is slow in a forked process

    fail(output)  # before any thread starts, because a fork copies no threads
    connect(TrainingOptions(accelerator="cpu", devices=2))
    train_all(output)
    run_study(output / "study")
    (output / "begun").touch()
    failing_fit(output / "run", "killed", devices=2)
