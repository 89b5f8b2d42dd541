"""Tests of checkpoints that are resumed with other optimizers, options or data: bitwise equal, or refused without any change."""

import json

import pytest
import torch
from checkpoint_runs import batches, equal_snapshots, halving, make, refusal, run

from flowbnn.errors import FlowBNNError
from flowbnn.training import EarlyStop, TrainingOptions, load_tensors


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.Adamax, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adadelta, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.Rprop, {}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.Adafactor, {}),
    ],
)
def test_torch_optimizers_resume_bitwise_equal(tmp_path, kind, settings):
    run(make(kind, **settings), tmp_path)
    resumed, expected = make(kind, **settings), make(kind, **settings)
    run(resumed, tmp_path, resume=True, epochs=4)
    run(expected, None, epochs=4)
    assert equal_snapshots(resumed, expected)


class FactoredOptimizer(torch.optim.Optimizer):
    """Third-party optimizer with state of other shapes and a counter in the parameter group."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    rows = p.grad.reshape(p.shape[0], -1).square().mean(1)
                    state["rows"] = state.get("rows", torch.zeros_like(rows)) + rows
                    p -= group["lr"] * p.grad / (1 + state["rows"].mean() / group["count"])


def test_third_party_optimizers_resume_bitwise_equal(tmp_path):
    run(make(FactoredOptimizer), tmp_path)
    resumed, expected = make(FactoredOptimizer), make(FactoredOptimizer)
    run(resumed, tmp_path, resume=True, epochs=4)
    run(expected, None, epochs=4)
    assert equal_snapshots(resumed, expected)


def test_resumed_run_keeps_its_optimizer_implementation(tmp_path):
    run(make(fused=True), tmp_path)
    parts = make(foreach=True)
    run(parts, tmp_path, resume=True, epochs=3)
    assert parts[1].param_groups[0]["fused"] is None
    assert parts[1].param_groups[0]["foreach"] is True


def test_changed_optimizers_and_schedules_are_refused(tmp_path):
    run(make(schedule=halving), tmp_path)
    exponential = make(schedule=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    cases = [
        (make(torch.optim.SGD, schedule=halving), "optimizer", ("Adam", "SGD")),
        (make(torch.optim.AdamW, schedule=halving), "optimizer", ("Adam", "AdamW")),
        (make(), "learning-rate schedule", ("StepLR", "none")),
        (exponential, "learning-rate schedule", ("StepLR", "ExponentialLR")),
    ]
    for parts, name, change in cases:
        error = refusal(tmp_path, parts)
        assert error.kind == "checkpoint"
        assert error.fields["changed"] == {name: change}
    network, _, _ = make()
    single = torch.optim.Adam(network.parameters())
    assert "parameter groups" in refusal(tmp_path, (network, single, halving(single))).fields["changed"]


def test_fewer_epochs_than_finished_are_refused(tmp_path):
    run(make(), tmp_path, epochs=3)
    assert refusal(tmp_path, make(), epochs=2).fields["changed"] == {"epochs": (3, 2)}
    assert run(make(), tmp_path, epochs=3, resume=True).epochs == 3


def test_fewer_epochs_than_started_are_refused(interrupted):
    error = refusal(interrupted, make(schedule=halving), epochs=1, early_stop=EarlyStop("loss"))
    assert error.fields["changed"] == {"epochs": (2, 1)}


@pytest.mark.parametrize("count", [3, 5])
def test_changed_numbers_of_batches_are_refused(tmp_path, count):
    run(make(), tmp_path)
    error = refusal(tmp_path, make(), loader=batches(count))
    assert error.fields["changed"] == {"batches per epoch": (4, count)}


def test_changed_seeds_have_no_effect(tmp_path):
    run(make(), tmp_path)
    content = (tmp_path / "last.safetensors").read_bytes()
    records = []
    for seed in (4, 5):
        (tmp_path / "last.safetensors").write_bytes(content)
        records.append(run(make(), tmp_path, resume=True, epochs=4, seed=seed).records)
    assert records[0] == records[1]


def test_changed_rules_for_early_stopping_are_refused(interrupted):
    parts = make(schedule=halving)
    error = refusal(interrupted, parts, early_stop=EarlyStop("log_likelihood", mode="max"))
    assert error.fields["changed"] == {"early stopping by": ("loss (min)", "log_likelihood (max)")}
    # without a rule the run continues, and ends with its last weights instead of the best of the first epoch
    history = run(parts, interrupted, resume=True, epochs=3)
    expected = make(schedule=halving)
    run(expected, None, epochs=3)
    assert history.best_epoch is None
    assert equal_snapshots(parts, expected)


def test_more_patience_continues_a_stopped_run(tmp_path):
    def validate(model):
        return {"nll": 1.0}

    stopped = run(make(), tmp_path, epochs=9, early_stop=EarlyStop(patience=2), validate=validate)
    assert (stopped.epochs, stopped.stopped_early) == (3, True)
    resumed = run(
        make(), tmp_path, epochs=9, resume=True, early_stop=EarlyStop(patience=4), validate=validate
    )
    assert (resumed.epochs, resumed.stopped_early, resumed.best_epoch) == (5, True, 0)


def test_monitoring_validation_without_validation_data_is_refused():
    def never(model, batch, clock):
        raise AssertionError("training began")

    with pytest.raises(FlowBNNError) as caught:
        run(make(), None, step=never, early_stop=EarlyStop())
    assert (caught.value.kind, caught.value.argument) == ("monitor", "early_stop")


@pytest.mark.parametrize("every", [None, 3])
@pytest.mark.parametrize("fault", ["raises", "monitor"])
def test_epoch_is_saved_before_a_failing_validation(tmp_path, every, fault):
    failures = {"remaining": 1}

    def validate(model):
        value = torch.rand(()).item()
        if model.training or torch.is_grad_enabled():
            raise AssertionError("validation runs in evaluation mode")
        if len(values) == 1 and failures["remaining"]:
            failures["remaining"] = 0
            if fault == "raises":
                raise FlowBNNError("the validation data have NaN")
            return {"accuracy": 1.0}
        values.append(value)
        return {"nll": value}

    values = []
    options = {"early_stop": EarlyStop(), "epochs": 4, "checkpoint_every": every}
    with pytest.raises(FlowBNNError) as caught:
        run(make(schedule=halving), tmp_path, validate=validate, **options)
    assert "\n" not in str(caught.value)
    stored = load_tensors(tmp_path / "last.safetensors")[1]
    assert (stored["position"]["epoch"], stored["position"]["step"]) == (1, 8)
    assert len(stored["position"]["history"]["records"]) == 1

    resumed = make(schedule=halving)
    history = run(resumed, tmp_path, validate=validate, resume=True, **options)
    expected, values = make(schedule=halving), []
    expected_history = run(expected, None, validate=validate, **(options | {"checkpoint_every": None}))
    assert history.records == expected_history.records
    assert history.best_epoch == expected_history.best_epoch
    assert equal_snapshots(resumed, expected)


def test_document_of_a_checkpoint_is_plain_json(interrupted):
    document = load_tensors(interrupted / "last.safetensors")[1]
    assert json.loads(json.dumps(document)) == document
    invariants = {"optimizer": "Adam", "learning-rate schedule": "StepLR", "batches per epoch": 4}
    assert invariants.items() <= document["invariants"].items()


def test_empty_paths_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for make_options in (lambda: TrainingOptions(checkpoint=""), lambda: TrainingOptions(log=" ")):
        with pytest.raises(FlowBNNError) as caught:
            make_options()
        assert caught.value.argument in ("checkpoint", "log")
    assert list(tmp_path.iterdir()) == []
