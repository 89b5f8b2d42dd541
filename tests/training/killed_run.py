"""Trains in forked children that are killed by SIGKILL, resumes them, and compares with a run left in peace."""

import os
import random
import signal
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # which torch's optimizers import, here once and not in every child
from objectives import train
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from flowbnn.training import EarlyStop, TrainingOptions, load_tensors, save_tensors, storage

BATCHES, EPOCHS, EVERY = 5, 6, 3


def make_loader(kind):
    source = torch.Generator().manual_seed(3)
    inputs = torch.randn(BATCHES * 4, 3, generator=source)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    own = torch.Generator().manual_seed(8)
    if kind == "own generator":
        return DataLoader(data, batch_size=4, shuffle=True, generator=own)
    if kind == "with replacement":
        return DataLoader(data, batch_size=4, sampler=RandomSampler(data, replacement=True, generator=own))
    if kind == "worker":
        return DataLoader(data, batch_size=4, shuffle=True, num_workers=1)
    if kind == "list":
        return [(inputs[i : i + 4], inputs[i : i + 4].sum(1, keepdim=True)) for i in range(0, len(inputs), 4)]
    return DataLoader(data, batch_size=4, shuffle=True)


def run(folder, kind, fresh, kill_at=None, kill_in=None, kill_validating=None):
    """One process: trains until it is done or kills itself at a step, or around the writing of a checkpoint."""
    seed = 0 if fresh else os.getpid()  # a resumed process must not profit from having the right seed
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

        def deadly(source, target):
            mine = next(counter) == number
            if mine and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)
            if mine:
                os.kill(os.getpid(), signal.SIGKILL)

        os.replace = deadly

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


def in_child(act, *args, **kwargs):
    """Run in a forked process; whether SIGKILL ended it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            act(*args, **kwargs)
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, f"a child failed: {args} {kwargs}"
    return False


def same(folder, other):
    (left, left_document), (right, right_document) = (
        load_tensors(f / "result.safetensors") for f in (folder, other)
    )
    bits = [(left[name].numpy().tobytes(), right[name].numpy().tobytes()) for name in left]
    return left.keys() == right.keys() and all(a == b for a, b in bits) and left_document == right_document


def write_killed(path):
    def killed(tensors, path, metadata):
        Path(path).with_name(".tmpAbC123").write_bytes(b"half")  # as safetensors does before it renames
        os.kill(os.getpid(), signal.SIGKILL)

    storage.save_file = killed
    save_tensors(path, {"x": torch.ones(2)}, {})


def kill_inside_a_write(folder):
    """What is there after the kill, and after the next write."""
    path = save_tensors(folder / "a.safetensors", {"x": torch.zeros(2)}, {})
    answer = {"killed": in_child(write_killed, path)}
    answer |= {"files": len(os.listdir(folder)), "held": load_tensors(path)[0]["x"].tolist()}
    save_tensors(path, {"x": torch.ones(2)}, {})
    return answer | {"after": os.listdir(folder)}


CASES = [
    ("shuffled", [{"kill_at": 4}, {"kill_at": 7}, {"kill_at": 8}, {"kill_at": 16}]),
    # before a checkpoint is written, and after one of an epoch's last step, before its record
    ("shuffled", [{"kill_in": ("after", 5)}]),
    ("shuffled", [{"kill_in": ("before", 2)}]),
    ("shuffled", [{"kill_validating": 2}, {"kill_validating": 1}, {"kill_validating": 3}]),
    ("own generator", [{"kill_at": 8}, {"kill_in": ("before", 1)}]),
    ("with replacement", [{"kill_at": 13}]),
    ("list", [{"kill_at": 11}]),
    ("worker", [{"kill_at": 8}]),
]


def disturbed_runs(folder):
    """One answer per case."""
    peaceful = {}
    for number, (kind, kills) in enumerate(CASES):
        if kind not in peaceful:
            peaceful[kind] = folder / f"peaceful-{kind}"
            assert not in_child(run, peaceful[kind], kind, fresh=True)
        disturbed = folder / f"killed-{number}"
        killed = [
            in_child(run, disturbed, kind, fresh=index == 0, **kill) for index, kill in enumerate(kills)
        ]
        assert not in_child(run, disturbed, kind, fresh=False)
        leftovers = [path.name for path in disturbed.iterdir() if path.suffix == ".part"]
        answer = {"case": kind, "kills": kills, "killed": all(killed), "leftovers": leftovers}
        history = load_tensors(disturbed / "result.safetensors")[1]["history"]
        answer |= {"steps": history["steps"], "stopped_early": history["stopped_early"]}
        yield answer | {"equal": same(peaceful[kind], disturbed)}
