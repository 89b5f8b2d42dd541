"""Trains in forked processes that are killed by SIGKILL, resumes them, and compares them with an uninterrupted run."""

import os
import random
import signal
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # torch's optimizers import it; here it is imported once for all forked processes
from objectives import train
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from flowbnn.training import EarlyStop, TrainingOptions, load_tensors, save_tensors, storage

BATCHES, EPOCHS, EVERY = 5, 6, 3


def make_loader(kind):
    source = torch.Generator().manual_seed(3)
    inputs = torch.randn(BATCHES * 4, 3, generator=source)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    generator = torch.Generator().manual_seed(8)
    if kind == "generator":
        return DataLoader(data, batch_size=4, shuffle=True, generator=generator)
    if kind == "with replacement":
        return DataLoader(
            data, batch_size=4, sampler=RandomSampler(data, replacement=True, generator=generator)
        )
    if kind == "worker":
        return DataLoader(data, batch_size=4, shuffle=True, num_workers=1)
    if kind == "list":
        return [(inputs[i : i + 4], inputs[i : i + 4].sum(1, keepdim=True)) for i in range(0, len(inputs), 4)]
    return DataLoader(data, batch_size=4, shuffle=True)


def run(folder, kind, fresh, kill_at=None, kill_in=None, kill_validating=None):
    """Trains until the run is complete or the process kills itself.

    Args:
        folder: Folder of the checkpoint and the result.
        kind: Kind of loader.
        fresh: If True, the run is new. If False, it is resumed.
        kill_at: Step at which the process kills itself.
        kill_in: ``("before" or "after", n)``: the process kills itself before or after the n-th rename of a file.
        kill_validating: Number of the validation in which the process kills itself.
    """
    seed = 0 if fresh else os.getpid()  # a resumed process must not depend on the seed
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    network = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
    scale = nn.Parameter(torch.zeros(()))
    groups = [{"params": list(network.parameters())}, {"params": [scale], "lr": 0.05}]
    network.register_parameter("scale", scale)
    optimizer = torch.optim.Adam(groups, lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=BATCHES * EPOCHS + 1)

    def step(model, batch, clock):
        inputs, targets = batch
        if clock.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        draw = torch.randn(inputs.shape) * random.random() + float(np.random.normal())  # noqa: NPY002
        error = (model(inputs * (1 + 0.1 * draw)) - targets * scale.exp()).square().mean()
        return error + 0.01 * scale**2, {"log_likelihood": -error}

    validations = iter(range(1, 1000))

    def validate(model):
        value = float(torch.rand(()) + random.random())
        if next(validations) == kill_validating:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"nll": value}

    if kill_in is not None:
        when, number = kill_in
        replace, counter = os.replace, iter(range(1, 1000))

        def replace_and_kill(source, target):
            last = next(counter) == number
            if last and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)
            if last:
                os.kill(os.getpid(), signal.SIGKILL)

        os.replace = replace_and_kill

    options = TrainingOptions(
        epochs=EPOCHS,
        checkpoint=folder,
        checkpoint_every=EVERY if kill_validating is None else None,
        resume=not fresh,
        seed=5 if fresh else 6,
        early_stop=EarlyStop(patience=3),
        accelerator="cpu",
    )
    history = train(
        network,
        step,
        optimizer,
        make_loader(kind),
        options,
        schedule=schedule,
        validate=validate,
    )
    result = history.to_dict()
    del result["seconds"]
    save_tensors(
        folder / "result.safetensors",
        network.state_dict(),
        {"history": result, "after": torch.rand(2).tolist()},
    )


def run_in_child(function, *args, **kwargs):
    """Calls a function in a forked process and returns True if SIGKILL ended it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            function(*args, **kwargs)
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, f"a child failed: {args} {kwargs}"
    return False


def equal_results(folder, other):
    """Returns True if two runs ended with bitwise equal weights and equal histories."""
    (left, left_document), (right, right_document) = (
        load_tensors(f / "result.safetensors") for f in (folder, other)
    )
    bits = [(left[name].numpy().tobytes(), right[name].numpy().tobytes()) for name in left]
    return left.keys() == right.keys() and all(a == b for a, b in bits) and left_document == right_document


def write_and_kill(path):
    """Kills the process while it writes a file."""

    def save_and_kill(tensors, path, metadata):
        Path(path).with_name(".tmpAbC123").write_bytes(b"half")  # safetensors writes such a file first
        os.kill(os.getpid(), signal.SIGKILL)

    storage.save_file = save_and_kill
    save_tensors(path, {"x": torch.ones(2)}, {})


def kill_inside_a_write(folder):
    """Returns the files after a killed write and after the next write."""
    path = save_tensors(folder / "a.safetensors", {"x": torch.zeros(2)}, {})
    result = {"killed": run_in_child(write_and_kill, path)}
    result |= {"files": len(os.listdir(folder)), "values": load_tensors(path)[0]["x"].tolist()}
    save_tensors(path, {"x": torch.ones(2)}, {})
    return result | {"files_after": os.listdir(folder)}


CASES = [
    ("shuffled", [{"kill_at": 4}, {"kill_at": 7}]),
    # between the last step of an epoch and its record
    ("shuffled", [{"kill_in": ("before", 2)}]),
    ("shuffled", [{"kill_validating": 2}]),
    ("worker", [{"kill_at": 8}]),
]
MORE_CASES = [
    ("shuffled", [{"kill_at": 4}, {"kill_at": 7}, {"kill_at": 8}, {"kill_at": 16}]),
    ("shuffled", [{"kill_in": ("after", 5)}]),  # before a checkpoint is written
    ("shuffled", [{"kill_validating": 2}, {"kill_validating": 1}, {"kill_validating": 3}]),
    ("generator", [{"kill_at": 8}, {"kill_in": ("before", 1)}]),
    ("with replacement", [{"kill_at": 13}]),
    ("list", [{"kill_at": 11}]),
]


def compare_killed_runs(cases, folder):
    """Yields one result per case."""
    uninterrupted = {}
    for number, (kind, kills) in enumerate(cases):
        if kind not in uninterrupted:
            uninterrupted[kind] = folder / f"uninterrupted-{kind}"
            assert not run_in_child(run, uninterrupted[kind], kind, fresh=True)
        disturbed = folder / f"killed-{number}"
        killed = [
            run_in_child(run, disturbed, kind, fresh=index == 0, **kill) for index, kill in enumerate(kills)
        ]
        assert not run_in_child(run, disturbed, kind, fresh=False)
        leftovers = [path.name for path in disturbed.iterdir() if path.suffix == ".part"]
        result = {"case": kind, "kills": kills, "killed": all(killed), "leftovers": leftovers}
        history = load_tensors(disturbed / "result.safetensors")[1]["history"]
        result |= {"steps": history["steps"], "stopped_early": history["stopped_early"]}
        yield result | {"equal": equal_results(uninterrupted[kind], disturbed)}
