"""Tests of the logs of a training run: CSV files and TensorBoard."""

import csv
import warnings

import pytest
from test_loop_callbacks import run

from flowbnn.errors import FlowBNNError
from flowbnn.methods import FitOptions
from flowbnn.training.history import History
from flowbnn.training.logs import CSVLog


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_log_has_a_row_for_every_epoch(tmp_path):
    path = tmp_path / "new" / "run.csv"
    for _ in range(2):  # a second run replaces the file
        _, history = run(log=path)
        assert [row["epoch"] for row in rows(path)] == ["1", "2", "3", "4"]
        for name in history.names:
            assert [float(row[name]) for row in rows(path)] == history[name]
        assert float(rows(path)[-1]["seconds"]) == pytest.approx(history.seconds, abs=0.5)
    assert [file.name for file in path.parent.iterdir()] == ["run.csv"]


def test_resumed_runs_continue_a_csv_log_without_duplicates(tmp_path):
    path = tmp_path / "run.csv"

    def fail_at_two(epoch):
        if epoch.number == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run([fail_at_two], log=path, checkpoint=tmp_path / "run")
    assert len(rows(path)) == 2
    before = path.read_text()
    # the row of an epoch that the checkpoint does not have, and the beginning of another
    path.write_text(before + before.splitlines()[-1].replace("2,", "3,", 1) + "\n4,1.0")
    _, history = run(log=path, checkpoint=tmp_path / "run", resume=True)
    assert [row["epoch"] for row in rows(path)] == ["1", "2", "3", "4"]
    assert path.read_text().startswith(before)
    assert [float(row["loss"]) for row in rows(path)] == history["loss"]


def test_csv_log_with_a_new_column(tmp_path):
    log, history = CSVLog(tmp_path / "a.csv", History()), History()
    for record in ({"loss": 1.0}, {"loss": 0.5, "kl": 2.0}, {"kl": 1.0}):
        history.records.append(record)
        history.seconds += 1.0
        log.write(history)
    assert (tmp_path / "a.csv").read_text() == (
        "epoch,seconds,loss,kl\n1,1.00,1.0,\n2,2.00,0.5,2.0\n3,3.00,,1.0\n"
    )


def test_other_csv_files_are_not_replaced(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("age,height\n3,95\n")
    with pytest.raises(FlowBNNError) as caught:
        run(log=path)
    assert (caught.value.kind, caught.value.argument) == ("file", "log")
    assert path.read_text() == "age,height\n3,95\n"


def test_tensorboard_log(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = tmp_path / "logs"
    run(log=folder, checkpoint=tmp_path / "run", epochs=2)
    _, history = run(log=folder, checkpoint=tmp_path / "run", resume=True)
    events = accumulator.EventAccumulator(str(folder)).Reload()
    points = [(event.step, event.value) for event in events.Scalars("loss")]
    assert points == [
        (number, pytest.approx(history["loss"][number - 1], rel=1e-6)) for number in (1, 2, 3, 4)
    ]


@pytest.mark.parametrize(
    ("log", "expected"), [("runs/a.csv", "runs/a-member-1.csv"), ("runs/a", "runs/a/member-1")]
)
def test_every_run_of_a_fit_has_its_own_log(log, expected):
    assert FitOptions(log=log).for_stage("member-1", "member 2/3").log.as_posix() == expected
