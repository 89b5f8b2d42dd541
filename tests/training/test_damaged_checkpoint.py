"""A checkpoint that was damaged or forged gives one line and changes nothing."""

import subprocess
import sys

import pytest
import torch
from checkpoint_runs import halving, make, refused, run, snapshot, step

from flowbnn.errors import FlowBNNError
from flowbnn.training import EarlyStop, load_tensors, load_weights, save_tensors


def edit(folder, way, value):
    """Change one place of the document; ``...`` removes it."""
    path = folder / "last.safetensors"
    tensors, document = load_tensors(path)
    *first, last = way
    place = document
    for part in first:
        place = place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    save_tensors(path, tensors, document)


DAMAGE = [
    (["position", "epoch"], "x", "position.epoch"),
    (["position", "epoch"], -5, "position.epoch"),
    (["position", "epoch"], True, "position.epoch"),
    (["position", "epoch"], 2, "position.epoch is 2"),
    (["position", "batches"], 1.5, "position.batches"),
    (["position", "batches"], 0, "averages"),
    (["position", "step"], None, "position.step"),
    (["position", "step"], 1, "position.step"),
    (["position", "step"], 10**400, "position.step"),
    (["position", "best"], "q", "position.best"),
    (["position", "best"], float("nan"), "position.best"),
    (["position", "best"], None, "best"),
    (["position", "waited"], [], "position.waited"),
    (["position", "waited"], ..., "'waited'"),
    (["position", "surprise"], 1, "'surprise'"),
    (["position", "monitor"], 3, "position.monitor"),
    (["position", "mode"], None, "position.mode"),
    (["position", "batches_per_epoch"], "four", "position.batches_per_epoch"),
    (["position"], [1, 2], "position"),
    (["averages"], "none", "averages"),
    (["averages", "totals"], "none", "averages.totals"),
    (["averages", "totals", "loss"], "1.0", "averages.totals"),
    (["averages", "weights", "loss"], 0, "averages.weights"),
    (["averages", "weights", "loss"], ..., "averages"),
    (["history", "seconds"], "long", "history.seconds"),
    (["history", "seconds"], float("inf"), "history.seconds"),
    (["history", "steps"], -1, "history.steps"),
    (["history", "records"], 3, "history.records"),
    (["history", "records", 0, "loss"], None, "history.records"),
    (["history", "stopped_early"], "no", "history.stopped_early"),
    (["history", "best_epoch"], 7, "history.best_epoch"),
    (["history", "title"], "x", "'title'"),
    (["groups"], [["a"], 3], "groups"),
    (["groups"], ..., "'groups'"),
    (["optimizer"], None, "optimizer"),
    (["torch"], 2, "torch"),
    (["state"], None, "state"),
    (["state", "scaler"], {"scale": "x"}, "state.scaler"),
    (["state", "scaler"], {"scale": -1.0}, "state.scaler"),
    (["state", "random"], {}, "does not decode"),
    (["state", "random", "now"], [], "does not decode"),
    (["state", "random", "epoch_start"], {}, "random state"),
    (["state", "random", "now", "python"], ..., "random state"),
    (["state", "random", "now", "numpy", "state", "pos"], 10**6, "random state"),
    (["state", "random", "now", "numpy", "state", "pos"], -1, "random state"),
    (["state", "weights"], ..., "'weights'"),
    (["state", "weights", "outside"], ..., "weights"),
    (["state", "weights", "outside"], [], "of the optimizer alone"),
    (["state", "weights", "outside"], [3.0], "of the optimizer alone"),
    (["state", "weights", "model"], [], "weights"),
    (["state", "weights", "model", "0.weight"], 3, "0.weight"),
    (["state", "best_weights", "model"], ..., "weights"),
    (["state", "best_weights", "outside"], 5, "weights"),
    (["state", "optimizer"], [], "state.optimizer"),
    (["state", "optimizer"], {}, "Adam"),
    (["state", "optimizer", "state"], [1], "Adam"),
    (["state", "optimizer", "state", "items", 0, 0], 99, "parameter 99"),
    (["state", "optimizer", "state", "items", 0, 0], "x", "parameter 'x'"),
    (["state", "optimizer", "state", "items", 0, 1], 5, "parameter 0"),
    (["state", "optimizer", "state", "items", 0, 1, "exp_avg"], ..., "'exp_avg' of '0.weight' is missing"),
    (["state", "optimizer", "state", "items", 0, 1, "exp_avg"], 0.5, "'exp_avg' of '0.weight'"),
    (["state", "optimizer", "state", "items", 0, 1, "step"], "x", "'step' of '0.weight'"),
    (["state", "optimizer", "param_groups"], {}, "parameter groups"),
    (["state", "optimizer", "param_groups", 0], 7, "parameter group"),
    (["state", "optimizer", "param_groups", 0, "params"], [0, 0, 0, 0], "parameter group"),
    (["state", "optimizer", "param_groups", 0, "lr"], "x", "'lr'"),
    (["state", "optimizer", "param_groups", 0, "lr"], -1.0, "learning rate is -1.0"),
    (["state", "optimizer", "param_groups", 0, "lr"], float("inf"), "learning rate is inf"),
    (["state", "optimizer", "param_groups", 0, "lr"], ..., "no learning rate"),
    (["state", "optimizer", "param_groups", 0, "betas"], 3, "'betas'"),
    (["state", "optimizer", "param_groups", 0, "betas"], [0.9], "'betas'"),
    (["state", "optimizer", "param_groups", 0, "betas"], [2.0, 2.0], "stored settings"),
    (["state", "optimizer", "param_groups", 0, "amsgrad"], True, "'max_exp_avg_sq' of '0.weight' is missing"),
    (["state", "optimizer", "param_groups", 0, "eps"], None, "'eps'"),
    (["state", "schedule"], None, "StepLR"),
    (["state", "schedule", "last_epoch"], "x", "'last_epoch'"),
    (["state", "schedule", "last_epoch"], ..., "'last_epoch' is missing"),
    (["state", "schedule", "base_lrs"], [0.1], "'base_lrs'"),
    (["state", "schedule", "step"], 3, "'step'"),
    (["state", "schedule", "optimizer"], 3, "'optimizer'"),
]


@pytest.mark.parametrize(("way", "value", "word"), DAMAGE)
def test_a_damaged_document_gives_one_line_and_changes_nothing(stopped, way, value, word):
    edit(stopped, way, value)
    refused(stopped, make(schedule=halving), word, early_stop=EarlyStop("loss"))


def test_what_was_not_damaged_is_resumed_to_the_bit(stopped):
    resumed, straight = make(schedule=halving), make(schedule=halving)
    history = run(resumed, stopped, resume=True, epochs=4, early_stop=EarlyStop("loss"))
    expected = run(straight, None, epochs=4, early_stop=EarlyStop("loss"))
    assert history.records == expected.records
    assert all(torch.equal(a, b) for a, b in zip(snapshot(resumed)[0], snapshot(straight)[0], strict=True))


def change_tensor(folder, name, value):
    path = folder / "last.safetensors"
    tensors, document = load_tensors(path)
    assert name in tensors
    save_tensors(path, {**tensors, name: value}, document)


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("optimizer/state/0/exp_avg", torch.zeros(1), "'exp_avg' of '0.weight' is (1,), not (3, 2)"),
        ("optimizer/state/0/exp_avg", torch.zeros(3, 2, dtype=torch.int64), "torch.int64"),
        (
            "optimizer/state/0/exp_avg_sq",
            torch.full((3, 2), torch.nan),
            "'exp_avg_sq' of '0.weight' holds NaN",
        ),
        ("optimizer/state/4/exp_avg", torch.zeros(3), "'exp_avg' of '(not in the model)' is (3,), not (2,)"),
        ("optimizer/state/0/step", torch.zeros(2), "'step' of '0.weight' is (2,), not ()"),
        ("optimizer/state/0/step", torch.tensor(-1.0), "step count of '0.weight' is -1.0"),
        ("optimizer/state/0/step", torch.tensor(torch.inf), "step count of '0.weight' is inf"),
        ("weights/model/2.bias", torch.tensor([torch.nan]), "NaN or infinite weights in '2.bias'"),
        ("weights/outside/0", torch.tensor([0.0, torch.inf]), "NaN or infinite weights"),
        ("weights/outside/0", torch.zeros(3), "(3,) there, (2,) here"),
        ("best_weights/model/0.weight", torch.full((3, 2), -torch.inf), "weights in '0.weight'"),
        ("random/now/torch", torch.zeros(5, dtype=torch.uint8), "random state"),
    ],
)
def test_hostile_tensors_give_one_line_and_change_nothing(tmp_path, name, value, word):
    def uses_all(model, batch, clock):
        loss, logs = step(model, batch, clock)
        return loss + (made[1].param_groups[1]["params"][0] ** 2).sum(), logs

    made = make(fused=True)
    run(made, tmp_path, step=uses_all, early_stop=EarlyStop("loss"))
    change_tensor(tmp_path, name, value)
    refused(tmp_path, make(fused=True), word, early_stop=EarlyStop("loss"))


HOSTILE_SIZE = """
import sys, torch
from torch import nn
from flowbnn.errors import FlowBNNError
from flowbnn.training import TrainingOptions, load_tensors, save_tensors, train

def fit(epochs):
    model = nn.Linear(600, 600)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    options = TrainingOptions(epochs=epochs, checkpoint=sys.argv[1], resume=epochs > 1, accelerator="cpu")
    train(model, lambda m, b, c: (m(b).square().mean(), {}), optimizer, [torch.ones(2, 600)], options)

fit(1)
path = sys.argv[1] + "/last.safetensors"
tensors, document = load_tensors(path)
save_tensors(path, {**tensors, "optimizer/state/0/exp_avg": torch.zeros(1)}, document)
try:
    fit(3)
except FlowBNNError as error:
    print(error)
"""


def test_a_moment_of_the_wrong_size_does_not_end_the_process(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE_SIZE, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "'exp_avg' of 'weight' is (1,), not (600, 600)" in done.stdout


def test_weights_that_are_not_finite_are_not_loaded(stopped):
    model = make()[0]
    before = [value.clone() for value in model.state_dict().values()]
    change_tensor(stopped, "best_weights/model/0.bias", torch.full((3,), torch.nan))
    with pytest.raises(FlowBNNError, match="NaN or infinite weights in '0.bias'"):
        load_weights(model, stopped / "last.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
