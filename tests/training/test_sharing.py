"""A batch shared out: the same noise, the same masks and the same examples as in one process. Refusals in one line."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNError
from flowbnn.noise import noise_layers
from flowbnn.noise.batched import divergences
from flowbnn.noise.passes import RowShard, current_share, share_batch
from flowbnn.training import TrainingOptions, connect
from flowbnn.training.device import TORCHRUN, device_kind, resolve_devices, silent_on_interrupt
from flowbnn.training.distributed import (
    RowShardLoader,
    row_shard,
    select_rows,
    sharded_dropout,
    synchronized_batch_norm,
    take_rows,
)

RECIPES = {
    "affine": fb.noise.NormalAffine(),
    "mixture": fb.noise.NormalAffine(components=3),
    "planar": fb.noise.NormalPlanar(2),
    "planar, position": fb.noise.NormalPlanar(2, site="position"),
    "affine, position": fb.noise.NormalAffine(site="position"),
    "mixture, position": fb.noise.NormalInvConv(components=2, site="position"),
    "dropout": fb.noise.Dropout(0.4),
    "glow": fb.noise.NormalGlow(1),
    "actnorm": fb.noise.FlowNoise(lambda dim: fb.transforms.ActNorm(dim)),
    "batch norm": fb.noise.FlowNoise(lambda dim: fb.transforms.BatchNorm(dim)),
}


def outputs(model, images, share=None):
    torch.manual_seed(3)
    share_batch(share)
    try:
        found = model(images)
        kl = sum(part.kl for part in divergences(noise_layers(model)).values())
    finally:
        share_batch(None)
    return found, kl, torch.rand(1)


@pytest.mark.parametrize("name", RECIPES)
def test_the_noise_does_not_depend_on_how_many_share_the_batch(name):
    """Three processes with 2, 2 and 3 of 7 examples: outputs, KL and the generator's state are those of one."""
    network = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(32, 4))
    torch.manual_seed(0)
    model = fb.to_stochastic(network, {"*": RECIPES[name]})
    images = torch.randn(7, 1, 8, 8)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    whole, kl, after = outputs(model, images)
    parts = []
    for rank in range(3):
        model.load_state_dict(start)
        share, _ = row_shard(7, rank, 3)
        found = outputs(model, images[share.start : share.stop], share)
        parts.append(found[0])
        assert torch.equal(torch.as_tensor(found[1]), torch.as_tensor(kl))
        assert torch.equal(found[2], after)
    assert (torch.cat(parts) - whole).abs().max() < 1e-5
    assert (parts[0] - parts[1]).abs().max() > 1e-3


def test_rows_that_are_no_multiple_of_the_examples_are_refused():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(torch.cat([x, x[:1]]))

    model = fb.to_stochastic(Odd(), {"*": fb.noise.NormalAffine()})
    with pytest.raises(FlowBNNError, match="sees 5 rows where this process has 4 examples"):
        outputs(model, torch.ones(4, 3), RowShard(0, 4, 8))


def test_a_prediction_forgets_the_share_and_training_finds_it_again():
    model = fb.to_stochastic(nn.Sequential(nn.Linear(3, 2)), {"*": fb.noise.NormalAffine()})
    share_batch(RowShard(0, 2, 4))
    try:
        found = fb.posterior.NoisePosterior(model, fb.likelihoods.Categorical()).predict(
            torch.ones(5, 3), 2, shared=False, seed=0
        )
        assert current_share() == RowShard(0, 2, 4)
    finally:
        share_batch(None)
    expected = fb.posterior.NoisePosterior(model, fb.likelihoods.Categorical()).predict(
        torch.ones(5, 3), 2, shared=False, seed=0
    )
    assert torch.equal(found.samples, expected.samples)


def test_dropout_of_the_networks_own_masks_as_one_process_does():
    network = nn.Sequential(
        nn.Dropout(0.5), nn.Dropout2d(0.5), nn.Dropout(0.3, inplace=True), nn.AlphaDropout(0.1)
    )
    images = torch.rand(7, 3, 4, 4) + 1
    network = network[:3]
    torch.manual_seed(1)
    whole = network(images)
    parts = []
    for rank in range(3):
        share, _ = row_shard(7, rank, 3)
        torch.manual_seed(1)
        with sharded_dropout(network, lambda share=share: share):
            parts.append(network(images[share.start : share.stop]))
    assert torch.equal(torch.cat(parts), whole)
    with sharded_dropout(network.eval(), lambda: share):
        assert torch.equal(network(images), images)
    assert not any("forward" in vars(layer) for layer in network)


def test_batch_norm_keeps_its_hooks_and_its_class():
    network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    seen = []
    network[1].register_forward_hook(lambda *args: seen.append(1))
    with synchronized_batch_norm(network, torch.device("cpu")) as able:
        assert not able
    with synchronized_batch_norm(network, torch.device("cuda")) as able:
        assert able
        assert type(network[1]) is nn.SyncBatchNorm
        network.eval()(torch.ones(4, 2))
    assert type(network[1]) is nn.BatchNorm1d
    assert seen == [1]


def loaders():
    inputs = torch.arange(23.0)
    data = TensorDataset(inputs, inputs.long())
    source = torch.Generator().manual_seed(4)

    class Mine(DataLoader):
        pass

    class Sampled(torch.utils.data.BatchSampler):
        pass

    sampler = torch.utils.data.RandomSampler(data, generator=source)
    return {
        "data loader": DataLoader(data, batch_size=5, shuffle=True, generator=source),
        "workers": DataLoader(data, batch_size=5, shuffle=True, generator=source, num_workers=1),
        "batch sampler": DataLoader(data, batch_sampler=Sampled(sampler, 5, False)),
        "subclass": Mine(data, batch_size=5, shuffle=True, generator=source),
        "tensor loader": TensorLoader(inputs, inputs.long(), batch_size=5, shuffle=True, generator=source),
        "list": [{"x": part, "y": [part.long()]} for part in inputs.split(5)],
        "ends with one": TensorLoader(inputs[:21], inputs[:21].long(), batch_size=5),
    }, source


@pytest.mark.parametrize("name", loaders()[0])
def test_the_shares_of_a_loader_make_its_batches(name):
    found, source = loaders()
    loader = found[name]
    state = source.get_state()
    whole = list(loader)
    parts, told = [], []
    for rank in range(3):
        source.set_state(state)
        heard = []
        mine = RowShardLoader(
            loader, rank, 3, lambda share, weight, heard=heard: heard.append((share, weight))
        )
        parts.append(list(mine))
        told.append(heard)
        assert len(mine) == len(loader)
    for number, batch in enumerate(whole):
        shares = [heard[number] for heard in told]
        real = [
            (part[number], share) for part, (share, weight) in zip(parts, shares, strict=True) if weight > 0
        ]
        values = [next(iter(part.values() if isinstance(part, dict) else part)) for part, _ in real]
        expected = next(iter(batch.values() if isinstance(batch, dict) else batch))
        assert torch.equal(torch.cat(values), expected)
        assert [len(value) for value in values] == [share.stop - share.start for _, share in real]
        assert sum(weight for _, weight in shares) == pytest.approx(3)
        assert {share.total for share, _ in shares} == {len(expected)}


def test_a_loader_that_is_shared_out_already_is_not_cut_again():
    data = TensorDataset(torch.arange(8.0))
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 2, 1, shuffle=False))
    for share_out in (
        lambda: RowShardLoader(loader, 1, 2, lambda *told: None),
        lambda: select_rows(loader, lambda number, rows: (0, rows), 1),
    ):
        with pytest.raises(FlowBNNError, match="leave the sampler out"):
            share_out()


def test_tensors_of_different_lengths_cannot_be_cut():
    with pytest.raises(FlowBNNError, match="tensors of 4 and of 3 rows"):
        take_rows((torch.zeros(4, 2), torch.zeros(3, 2)), 0, 2)


@pytest.mark.parametrize(
    ("there", "asked", "words"),
    [
        (0, {"accelerator": "cuda"}, "accelerator='cuda' asks for a GPU and torch sees none here"),
        (0, {"accelerator": "gpu", "devices": 2}, "asks for a GPU and torch sees none here"),
        (0, {"accelerator": "mps"}, "Apple's GPU"),
        (1, {"devices": 2}, r"devices=2 was asked for and this machine has 1 GPU \(H200\)"),
        (2, {"devices": 4, "accelerator": "cuda"}, r"this machine has 2 GPUs \(H200\): ask for at most 2"),
        (1, {"devices": 0}, "devices=.*integer of at least 1"),
        (1, {"devices": 10**6, "accelerator": "cpu"}, "would start 1000000 processes on .* ask for at most"),
    ],
)
def test_devices_that_are_not_there(monkeypatch, there, asked, words):
    monkeypatch.setattr("torch.cuda.is_available", lambda: there > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: there)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index=0: "H200")
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    with pytest.raises(FlowBNNError, match=words) as caught:
        connect(TrainingOptions(**asked))
    assert "\n" not in str(caught.value)
    assert caught.value.argument in ("devices", "accelerator")


def test_what_torchrun_started_is_what_there_is(monkeypatch):
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert resolve_devices(TrainingOptions(accelerator="cpu")) == ("cpu", 2, 2)
    assert resolve_devices(TrainingOptions(accelerator="cpu", devices="auto", num_nodes=2)) == ("cpu", 2, 2)
    with pytest.raises(FlowBNNError, match="torchrun started 2 processes on each of 2 machines"):
        resolve_devices(TrainingOptions(accelerator="cpu", devices=3))
    assert device_kind("cpu") == "cpu"


def test_machines_without_torchrun_and_scripts_that_are_none(monkeypatch):
    with pytest.raises(FlowBNNError, match="num_nodes=2: start the script with torchrun"):
        connect(TrainingOptions(num_nodes=2, accelerator="cpu"))
    monkeypatch.setattr("__main__.__spec__", None)
    monkeypatch.setattr("sys.argv", ["-c"])
    with pytest.raises(FlowBNNError, match="there is none"):
        connect(TrainingOptions(devices=2, accelerator="cpu"))


def test_a_module_and_a_script_are_run_again_under_torchrun(monkeypatch):
    def replaced(program, command):
        raise SystemExit(" ".join(command[1:]))

    monkeypatch.setattr("os.execv", replaced)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("sys.argv", [__file__, "run", "digits"])
    for spec, again in (
        (SimpleNamespace(name="flowbnn_studies.__main__"), "-m flowbnn_studies"),
        (None, __file__),
    ):
        monkeypatch.setattr("__main__.__spec__", spec)
        with pytest.raises(SystemExit) as started:
            connect(TrainingOptions(devices=3, accelerator="cpu"))
        torchrun = f"-c {TORCHRUN} --standalone --nproc-per-node 3"
        assert started.value.code == f"{torchrun} {again} run digits"


def test_only_the_first_process_tells_of_an_interruption():
    told = []
    hook = silent_on_interrupt(lambda *given: told.append(given[0]))
    for error in (KeyboardInterrupt(), ValueError()):
        hook(type(error), error, None)
    assert told == [ValueError]


def test_a_missing_gpu_is_one_line_on_the_command_line(monkeypatch, capsys):
    from flowbnn_studies.cli import app

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        app(["run", "digits", "--device", "cuda"])
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "--device" in shown.err
    assert "asks for a GPU and torch sees none here" in shown.err
