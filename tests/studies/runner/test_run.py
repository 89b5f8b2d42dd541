"""Tests of the runner: results, resuming, archiving and errors."""

import json
import signal
import subprocess
import sys

import pytest
import torch
from tiny_study import Settings, Tiny, registered

from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn_studies import Study, Variant
from flowbnn_studies.report import load_results
from flowbnn_studies.runner.run import block_interrupts, run_study


@pytest.fixture
def study():
    with registered(Tiny()) as tiny:
        yield tiny


def run(study, folder, **options):
    return run_study(study, out=folder, progress=False, **options)


def test_results_follow_the_schema(study, tmp_path):
    results = run(study, tmp_path)
    assert results == load_results(tmp_path / "tiny")
    assert results["rows"][0]["values"]["score"] == {
        "mean": 3.0,
        "std": pytest.approx(2**0.5),
        "per_seed": [2.0, 4.0],
        "published": None,
    }
    assert results["answer"] == "4.0"
    assert results["seeds"] == [0, 1]
    assert results["settings"]["slope"] == 2.0
    assert set(results["versions"]) == {"flowbnn", "torch", "python"}
    assert results["command"] == "flowbnn run tiny"


def test_variant_runs_after_the_one_it_starts_from(study, tmp_path):
    run(study, tmp_path)
    assert study.calls == [("base", 0), ("base", 1), ("more", 0), ("more", 1)]


def test_resume_runs_only_unfinished_jobs(study, tmp_path):
    study.stop_at = ("more", 0)
    with pytest.raises(KeyboardInterrupt):
        run(study, tmp_path)
    assert not (tmp_path / "tiny" / "results.json").exists()
    study.stop_at, study.calls = None, []
    results = run(study, tmp_path, resume=True)
    assert study.calls == [("more", 0), ("more", 1)]
    assert results["rows"][1]["values"]["score"]["per_seed"] == [3.0, 5.0]
    assert any("2 of 4 trainings" in note for note in results["notes"])


def test_reused_results_keep_their_times(study, tmp_path):
    run(study, tmp_path)
    for path in (tmp_path / "tiny" / "parts").iterdir():
        document = json.loads(path.read_text())
        document["content"]["seconds"] = 100.0
        path.write_text(json.dumps(document))
    assert run(study, tmp_path, resume=True)["seconds"] == 400.0


def test_without_resume_all_jobs_run_again(study, tmp_path):
    run(study, tmp_path)
    run(study, tmp_path)
    assert len(study.calls) == 8


def test_finished_trainings_are_archived_with_their_networks(study, tmp_path):
    scores, networks, folder = [], set(), tmp_path / "tiny"
    for slope in (1.0, 2.0, 3.0):
        run(study, tmp_path, settings=Settings(slope=slope))
        networks |= {path.read_bytes() for path in folder.glob("checkpoints/*/posterior.safetensors")}
    study.stop_at = ("base", 0)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(study, tmp_path)
    for path in sorted((folder / "earlier").glob("base-seed1*.json")):
        scores.append(json.loads(path.read_text())["content"]["values"]["score"])
    assert sorted(scores) == [2.0, 4.0, 6.0]
    archived = sorted((folder / "earlier").glob("*.safetensors"))
    assert networks <= {path.read_bytes() for path in archived}
    assert len(archived) >= 3
    assert all(path.with_suffix(".json").exists() for path in archived)
    study.stop_at = None
    study.calls = []
    run(study, tmp_path, resume=True, settings=Settings(slope=3.0))  # archived results are not reused
    assert len(study.calls) == 4


def test_additional_seeds_are_added(study, tmp_path):
    run(study, tmp_path)
    study.calls = []
    results = run(study, tmp_path, seeds=3, resume=True)
    assert study.calls == [("base", 2), ("more", 2)]
    assert results["seeds"] == [0, 1, 2]


@pytest.mark.parametrize("change", [{"settings": Settings(slope=3.0)}, {"precision": "bf16-mixed"}])
def test_results_of_other_settings_are_ignored(study, tmp_path, change):
    run(study, tmp_path)
    left_over = tmp_path / "tiny" / "checkpoints" / "base-seed0" / "last.safetensors"
    left_over.write_text("of the other settings")
    study.calls = []
    run(study, tmp_path, resume=True, **change)
    assert len(study.calls) == 4
    assert not left_over.exists()


def test_damaged_result_is_computed_again(study, tmp_path):
    run(study, tmp_path)
    (tmp_path / "tiny" / "parts" / "more-seed1.json").write_text('{"identity"')
    study.calls = []
    run(study, tmp_path, resume=True)
    assert study.calls == [("more", 1)]


def test_missing_network_is_trained_again(study, tmp_path):
    run(study, tmp_path)
    (tmp_path / "tiny" / "checkpoints" / "base-seed0" / "posterior.safetensors").unlink()
    study.calls = []
    run(study, tmp_path, resume=True)
    assert study.calls == [("base", 0)]


def test_study_without_networks_is_resumed(tmp_path):
    class Bare(Tiny):
        keep_networks = Study.keep_networks

        def variants(self, settings):
            return (Variant("more", "More"),)

        def train(self, job):
            self.calls.append((job.variant, job.seed))
            return {"values": {"score": 1.0}}

    with registered(Bare()) as study:
        for resume in (False, True):
            run(study, tmp_path, resume=resume)
    assert study.calls == [("more", 0), ("more", 1)]


def test_old_results_stay_until_new_ones_are_complete(study, tmp_path):
    run(study, tmp_path)
    before = (tmp_path / "tiny" / "results.json").read_text()
    study.stop_at = ("more", 1)
    with pytest.raises(KeyboardInterrupt):
        run(study, tmp_path, settings=Settings(slope=5.0))
    assert (tmp_path / "tiny" / "results.json").read_text() == before


def test_warnings_of_a_fit_are_recorded(study, tmp_path):
    import warnings

    class WarningStudy(Tiny):
        def train(self, job):
            warnings.warn("layer 'fc1' has collapsed", FlowBNNWarning)
            return super().train(job)

    with registered(WarningStudy()) as loud:
        run(loud, tmp_path)
        content = json.loads((tmp_path / "tiny" / "parts" / "more-seed0.json").read_text())["content"]
    assert [entry["text"] for entry in content["warnings"]] == ["layer 'fc1' has collapsed"]


def test_random_state_and_threads_are_restored(study, tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    run(study, tmp_path)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("seeds", [0, -1, [1, 1], []])
def test_invalid_seeds_are_refused(study, tmp_path, seeds):
    with pytest.raises(FlowBNNError) as caught:
        run(study, tmp_path, seeds=seeds)
    assert caught.value.argument == "seeds"


def test_unwritable_folder_is_refused_before_training(study, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FlowBNNError) as caught:
        run(study, tmp_path / "file")
    assert "\n" not in str(caught.value)
    assert study.calls == []


def test_unknown_setting_is_refused(study):
    with pytest.raises(FlowBNNError) as caught:
        study.make_settings(slpe=1.0)
    assert caught.value.argument == "slpe"
    assert "'slope'" in str(caught.value)


def test_settings_are_type_checked(study):
    assert study.make_settings(slope=3) == Settings(slope=3.0)
    for wrong in ({"epochs": 1.5}, {"epochs": True}, {"slope": "much"}):
        with pytest.raises(FlowBNNError) as caught:
            study.make_settings(**wrong)
        assert caught.value.argument in wrong


def test_child_processes_ignore_interrupts():
    code = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    with block_interrupts():
        process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "True"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
