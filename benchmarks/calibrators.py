"""Compares ``fb.calibrate`` with every post-hoc calibrator, over networks, numbers of held-out examples and seeds.

    python benchmarks/calibrators.py --quick --out results            # two small networks, minutes on a CPU
    FLOWBNN_DATA=data python benchmarks/calibrators.py --device cuda --jobs 8 --out results
    FLOWBNN_DATA=data python benchmarks/calibrators.py --jobs 14 --only mlp --out results

A network is trained once for each seed. Each calibrator is then fitted to 100, 300, 1,000 and 5,000 other examples, and tested on the
same test data. The full plan has LeNet on 1,000 images of Fashion-MNIST, VGG16 and ResNet18 on 45,000 images of CIFAR-10, and MLPs on
1,000 rows of two UCI tables, whose targets are divided into five classes of equal size. The small networks of ``--quick`` are included.
``--only vgg16-cifar10-small`` adds VGG16 on the 10,000 images of ``test_batch.bin`` of CIFAR-10, of which 5,000 are for training, 2,000
held out and 3,000 for the test.

Results are written after every cell (network, number of examples, seed), and a run with the same ``--out`` continues where another has
stopped. ``--only``, ``--sizes``, ``--first`` and ``--seeds`` select cells. The epochs of every training are stored in ``training``.
``--networks`` is a folder of trained networks: a network that is not there is trained and stored, and ``--train`` stops after that.

The summary compares ``calibrate`` with the best rival of each cell (that with the lowest mean NLL over seeds), paired by seed, with
Student's 95 % interval.
"""

import json
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch
from common import make_parser, positive_int
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.models import MLP, VGG16, LeNet, ResNet18
from flowbnn.posterior import PointPosterior
from flowbnn_studies.data.augment import CropAndFlip
from flowbnn_studies.data.load import load_images
from flowbnn_studies.data.tables import load_uci, standardize
from flowbnn_studies.runner.findings import paired_difference

Pair = tuple[Tensor, Tensor]
cells: Any = None  # queue of a process of the pool
RIVALS = ("plain", "temperature", "svs", "sms", "refit")


@dataclass(frozen=True)
class Problem:
    """A network, its data and its training.

    Args:
        load: Function from a seed to training data, held-out data and test data.
        network: Function that returns a new network.
        sizes: Numbers of held-out examples.
        epochs: Number of epochs of the training.
        lr: Learning rate.
        batch: Batch size.
        augment: True to translate and mirror training images, with SGD and one cycle of the learning rate.
    """

    load: Callable[[int], tuple[Pair, Pair, Pair]]
    network: Callable[[], nn.Module]
    sizes: tuple[int, ...] = (100, 300, 1000, 5000)
    epochs: int = 100
    lr: float = 2e-3
    batch: int = 64
    augment: bool = False


def split(inputs: Tensor, targets: Tensor, counts: tuple[int, int], seed: int) -> tuple[Pair, Pair, Pair]:
    """Returns random training data, held-out data and test data of one table.

    Args:
        inputs: All inputs.
        targets: All targets.
        counts: Numbers of training and held-out examples. The others are for the test.
        seed: Seed of the order.
    """
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
    first, second = counts[0], sum(counts)
    training, held_out, test = (
        (inputs[rows], targets[rows]) for rows in (order[:first], order[first:second], order[second:])
    )
    return training, held_out, test


def load_digits(seed: int) -> tuple[Pair, Pair, Pair]:
    """Returns the digits of scikit-learn: 200 for training, 600 held out, 997 for the test."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    inputs, targets = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    return split(inputs, targets, (200, 600), seed)


def load_synthetic(seed: int) -> tuple[Pair, Pair, Pair]:
    """Returns five classes in ten dimensions, whose labels are drawn from a random network."""
    generator = torch.Generator().manual_seed(1234)
    weights = [torch.randn(10, 16, generator=generator), torch.randn(16, 5, generator=generator)]
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(3800, 10, generator=generator)
    logits = (inputs @ weights[0] / 2.0).tanh() @ weights[1]
    targets = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    return split(inputs, targets, (200, 600), seed)


def load_fashion(seed: int) -> tuple[Pair, Pair, Pair]:
    """Returns 1,000 training images, 5,000 held-out images and the test images of Fashion-MNIST."""
    images, test = load_images("fashion-mnist"), load_images("fashion-mnist", "test")
    training, held_out, _ = split(images.normalized(), images.labels, (1000, 5000), seed)
    return training, held_out, (images.normalizer()(test.images), test.labels)


def load_cifar10(seed: int) -> tuple[Pair, Pair, Pair]:
    """Returns 45,000 training images, 5,000 held-out images and the test images of CIFAR-10."""
    images, test = load_images("cifar10"), load_images("cifar10", "test")
    training, held_out = images.split(5000, seed)
    normalize = images.normalizer()
    parts = tuple((normalize(part.images), part.labels) for part in (training, held_out, test))
    return parts[0], parts[1], parts[2]


def load_cifar10_small(seed: int) -> tuple[Pair, Pair, Pair]:
    """Returns 5,000 training images, 2,000 held-out images and 3,000 test images, all from the test batch of CIFAR-10."""
    images = load_images("cifar10", "test")
    return split(images.normalized(), images.labels, (5000, 2000), seed)


def load_uci_classes(name: str) -> Callable[[int], tuple[Pair, Pair, Pair]]:
    """Returns a function that loads a UCI table, with the targets in five classes of equal size."""

    def load(seed: int) -> tuple[Pair, Pair, Pair]:
        inputs, targets, *test = load_uci(name, 0)
        inputs, targets = torch.cat([inputs, test[0]]), torch.cat([targets, test[1]])[:, 0]
        edges = targets.quantile(torch.tensor([0.2, 0.4, 0.6, 0.8]))
        return split(standardize(inputs)[0], torch.bucketize(targets, edges), (1000, 5000), seed)

    return load


QUICK = {
    "digits-mlp": Problem(load_digits, lambda: MLP(64, (64,), 10), (100, 300), epochs=60),
    "synthetic-mlp": Problem(load_synthetic, lambda: MLP(10, (32, 32), 5), (100, 300), epochs=60),
}
IMAGES_AND_TABLES = {
    "lenet-fashion": Problem(load_fashion, lambda: LeNet(1), epochs=60),
    "vgg16-cifar10": Problem(load_cifar10, lambda: VGG16(3), epochs=30, lr=0.05, batch=128, augment=True),
    "resnet18-cifar10": Problem(
        load_cifar10, lambda: ResNet18(3), epochs=15, lr=0.1, batch=128, augment=True
    ),
    "mlp-protein": Problem(load_uci_classes("protein"), lambda: MLP(9, (50, 50), 5)),
    "mlp-kin8nm": Problem(load_uci_classes("kin8nm"), lambda: MLP(8, (50, 50), 5)),
}
ON_REQUEST = {
    "vgg16-cifar10-small": Problem(
        load_cifar10_small, lambda: VGG16(3), (100, 300, 1000), epochs=60, lr=0.05, batch=128, augment=True
    ),
}
PROBLEMS = QUICK | IMAGES_AND_TABLES


def train(problem: Problem, data: Pair, seed: int, device: str) -> PointPosterior:
    """Trains the network of a problem."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {}
    if problem.augment:

        def sgd(groups: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(groups, lr=problem.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)

        def one_cycle(optimizer: torch.optim.Optimizer, steps: int) -> Any:
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, problem.lr, total_steps=steps)

        settings = {"optimizer": sgd, "schedule": one_cycle}
    augment = CropAndFlip() if problem.augment else None
    tensors = [tensor.to(device) for tensor in data]
    loader = TensorLoader(*tensors, batch_size=problem.batch, shuffle=True, augment=augment)
    method = fb.MLE(epochs=problem.epochs, lr=problem.lr, **settings)
    options: dict[str, Any] = {"seed": seed, "progress": False, "accelerator": device}
    if problem.augment and device == "cuda":
        options |= {"precision": "bf16-mixed", "acceleration": "compile"}
    return method.fit(problem.network().to(device), loader, **options)


def load_or_train(job: "Job", problem: Problem, data: Pair) -> tuple[PointPosterior, dict[str, Any]]:
    """Returns the network of a job and the settings of its training. Networks in the folder are not trained again."""
    path = (job.networks or Path()) / f"{job.name}-{job.seed}.flowbnn"
    settings_path = path.with_suffix(".json")  # written last, so that its network is complete
    if job.networks is not None and settings_path.is_file():
        posterior = fb.load_posterior(path, problem.network().to(job.device))
        return posterior, json.loads(settings_path.read_text())
    start = time.perf_counter()
    posterior = train(problem, data, job.seed, job.device)
    settings = {"epochs": problem.epochs, "seconds": time.perf_counter() - start}
    if job.networks is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        posterior.save(path)
        settings_path.write_text(json.dumps(settings))
    return posterior, settings


def fit_calibrators(
    plain: PointPosterior, held_out: Pair, seed: int, device: str
) -> dict[str, Callable[[], fb.Posterior]]:
    """Returns functions that fit each calibrator to the held-out data."""
    quiet: dict[str, Any] = {"progress": False, "seed": seed, "accelerator": device}

    def fit_noise(prior: Literal["fixed", "fitted"]) -> fb.Posterior:
        return fb.calibrate(plain.model, held_out, candidates=["noise"], prior=prior, folds=0, **quiet)

    return {
        "plain": lambda: plain,
        "temperature": lambda: fb.Temperature().fit(plain, held_out, **quiet),
        "svs": lambda: fb.VectorScaling().fit(plain, held_out, **quiet),
        "sms": lambda: fb.MatrixScaling().fit(plain, held_out, **quiet),
        "refit": lambda: fb.LastLayerRefit().fit(plain, held_out, **quiet),
        "noise, fixed prior": lambda: fit_noise("fixed"),
        "noise, fitted prior": lambda: fit_noise("fitted"),
        "calibrate": lambda: fb.calibrate(plain.model, held_out, **quiet),
    }


class Job(NamedTuple):
    """Training and calibration of one network.

    Args:
        name: Name of the problem.
        seed: Seed of data and training.
        device: Device of the network.
        threads: Number of threads.
        finished: Cells with results, which are left out.
        sizes: Numbers of held-out examples; empty for all of the plan.
        epochs: Number of epochs of the training; None for that of the plan.
        networks: Folder of trained networks, or None.
        train_only: True to stop after the training.
    """

    name: str
    seed: int
    device: str
    threads: int
    finished: frozenset[str]
    sizes: tuple[int, ...]
    epochs: int | None
    networks: Path | None
    train_only: bool


Cell = tuple[
    str, dict[str, Any], dict[str, Any]
]  # name, scores of all calibrators, and settings of the training


def run_job(job: Job) -> Iterator[Cell]:
    """Trains one network, and yields the scores of all calibrators after every cell."""
    torch.set_num_threads(job.threads)
    warnings.simplefilter("ignore")
    problem, seed, device = (PROBLEMS | ON_REQUEST)[job.name], job.seed, job.device
    problem = replace(problem, epochs=job.epochs or problem.epochs)
    planned = [size for size in problem.sizes if not job.sizes or size in job.sizes]
    sizes = [size for size in planned if f"{job.name}/{size}/{seed}" not in job.finished]
    if not sizes:
        return
    training, held_out, test = problem.load(seed)
    plain, settings = load_or_train(job, problem, training)
    if job.train_only:
        return
    if device == "cuda":
        plain.model.to(memory_format=torch.channels_last)  # saves conversions in every convolution
    test = (test[0].to(device), test[1].to(device))
    for size in sizes:
        examples = held_out[0][:size].to(device), held_out[1][:size].to(device)
        scores: dict[str, Any] = {}
        for key, fit in fit_calibrators(plain, examples, seed, device).items():
            start = time.perf_counter()
            posterior = fit()
            seconds = time.perf_counter() - start
            numbers = fb.evaluate(posterior, [test], samples=64, progress=False)
            scores[key] = {metric: numbers[metric] for metric in ("nll", "ece", "accuracy")}
            scores[key]["seconds"] = seconds
            if key == "calibrate":
                assert posterior.calibration is not None
                scores[key] |= {"choice": posterior.calibration.choice, "prior": posterior.calibration.prior}
                scores[key] |= {"cross-validated nll": dict(posterior.calibration.nll)}
        yield f"{job.name}/{size}/{seed}", scores, settings


def set_queue(queue: Any) -> None:
    """Sets the queue to which a process of the pool sends its cells."""
    global cells
    cells = queue


def send_job(job: Job) -> None:
    """Runs a job in a process of the pool."""
    for cell in run_job(job):
        cells.put(cell)


def run_jobs(jobs: list[Job], processes: int) -> Iterator[Cell]:
    """Yields the cells of all jobs as they finish."""
    if processes == 1:
        for job in jobs:
            yield from run_job(job)
        return
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with context.Pool(processes, set_queue, (queue,), maxtasksperchild=1) as pool:
        result = pool.map_async(send_job, jobs, chunksize=1)
        while not (result.ready() and queue.empty()):
            with suppress(Empty):
                yield queue.get(timeout=1.0)
        result.get()  # raises the error of a job


def summarize(rows: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the comparison of each cell, and prints it."""
    cells: dict[str, list[dict[str, Any]]] = {}
    for key, scores in rows.items():
        cells.setdefault(key.rpartition("/")[0], []).append(scores)
    table = []
    for cell, runs in cells.items():
        nll = {key: [run[key]["nll"] for run in runs] for key in runs[0]}
        ece = {key: fmean(run[key]["ece"] for run in runs) for key in runs[0]}
        best = min(RIVALS, key=lambda key: fmean(nll[key]))
        gap = paired_difference(nll["calibrate"], nll[best])
        ece_gap = paired_difference(
            *([run[key]["ece"] for run in runs] for key in ("calibrate", "temperature"))
        )
        prior_gap = paired_difference(nll["noise, fitted prior"], nll["noise, fixed prior"])
        choices = [run["calibrate"]["choice"] for run in runs]
        table.append(
            {
                "cell": cell,
                "seeds": len(runs),
                "nll": {key: fmean(values) for key, values in nll.items()},
                "ece": ece,
                "best rival": best,
                "difference": gap.mean,
                "interval": [gap.low, gap.high],
                "ece difference to temperature": ece_gap.mean,
                "ece interval": [ece_gap.low, ece_gap.high],
                "fitted minus fixed prior": prior_gap.mean,
                "prior interval": [prior_gap.low, prior_gap.high],
                "choices": {choice: choices.count(choice) for choice in sorted(set(choices))},
                "seconds": fmean(run["calibrate"]["seconds"] for run in runs),
            }
        )
        values = "  ".join(f"{key} {fmean(values):.4f}" for key, values in nll.items())
        print(f"{cell}, {len(runs)} seeds\n  NLL {values}")
        print("  ECE " + "  ".join(f"{key} {value:.4f}" for key, value in ece.items()))
        print(
            f"  calibrate - {best}: {gap.mean:+.4f} (95 % CI {gap.low:+.4f} to {gap.high:+.4f}); {table[-1]['choices']}"
        )
    mean = fmean(row["difference"] for row in table)
    better = sum(row["interval"][1] < 0 for row in table)
    worse = sum(row["interval"][0] > 0 for row in table)
    print(
        f"mean difference to the best rival {mean:+.4f}; better in {better}, worse in {worse} of {len(table)} cells"
    )
    return table


def main() -> None:
    """Runs the benchmark."""
    parser = make_parser(__doc__, threads=2, seeds=10, jobs=1)
    parser.add_argument("--quick", action="store_true", help="two small networks that need no data files")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument(
        "--sizes", type=int, nargs="+", help="numbers of held-out examples, out of those of the plan"
    )
    parser.add_argument(
        "--epochs", type=positive_int, help="epochs of the training, instead of those of the plan"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--only", default="", help="words in the names of problems, with commas between them")
    parser.add_argument("--out", type=Path, default=None, help="folder of calibrators.json")
    parser.add_argument(
        "--networks", type=Path, help="folder of trained networks, which are trained if missing"
    )
    parser.add_argument("--train", action="store_true", help="train the networks without calibrating them")
    arguments = parser.parse_args()
    if arguments.train and arguments.networks is None:
        parser.error("--train needs --networks, the folder of the trained networks")
    path = None if arguments.out is None else arguments.out / "calibrators.json"
    document: dict[str, Any] = {"torch": torch.__version__, "device": arguments.device, "rows": {}}
    if path is not None and path.is_file():
        document |= json.loads(path.read_text())
    rows = document["rows"]

    def save(table: Any = None) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            part.write_text(json.dumps(document | {"table": table}, indent=1))
            os.replace(part, path)  # a killed run leaves the old file or the new one

    words = [word.strip() for word in arguments.only.split(",")]
    names = [name for name in (QUICK if arguments.quick else PROBLEMS) if any(word in name for word in words)]
    names += [name for name in ON_REQUEST if name in words]
    finished, threads = frozenset(rows), 1 if arguments.jobs > 1 else arguments.threads
    jobs = [
        Job(
            name,
            seed,
            arguments.device,
            threads,
            finished,
            tuple(arguments.sizes or ()),
            arguments.epochs,
            arguments.networks,
            arguments.train,
        )
        for seed in range(arguments.first, arguments.first + arguments.seeds)
        for name in names
    ]
    for cell, scores, settings in run_jobs(jobs, arguments.jobs):
        rows[cell] = scores
        document.setdefault("training", {})[cell] = settings
        save()
    if arguments.train:
        return
    if not rows:
        raise SystemExit("no cell selected; see --only and --sizes")
    save(summarize(rows))


if __name__ == "__main__":
    main()
