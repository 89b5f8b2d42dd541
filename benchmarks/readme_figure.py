"""Draws the figure of the README: digits that a network has never seen, and accuracy against the share of inputs that are answered.

    python benchmarks/readme_figure.py [--seeds 5] [--out docs/images/readme.png]

A small convolutional network is trained on 150 digits of scikit-learn without eights, and calibrated on 400 held-out digits by
:func:`flowbnn.calibrate`. The test stream has 406 digits of the known classes and all 174 eights. Every answer to an eight is wrong.
Seeds change the training digits, the held-out digits and the initial weights. The curves are means, with their range over the seeds.
The images show answers of the first seed: four test digits of known classes, and the first six eights.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from common import make_parser
from matplotlib import pyplot as plt
from torch import Tensor

import flowbnn as fb
from flowbnn.data import TensorLoader, load_digits
from flowbnn.models import SmallConv
from flowbnn.posterior import Posterior

NOVEL = 8
PLAIN, CALIBRATED = "#D55E00", "#0072B2"  # of the palette by Okabe and Ito
FLOORS = torch.linspace(0.05, 1.0, 200)


def fit(seed: int) -> tuple[Posterior, Posterior]:
    """Returns a trained network and the same network after calibration."""
    inputs, labels = load_digits(novel=NOVEL).train
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    train, held_out = order[:150], order[150:550]
    torch.manual_seed(seed)
    loader = TensorLoader(inputs[train], labels[train], batch_size=64, shuffle=True)
    plain = fb.MLE(epochs=60, lr=0.01).fit(SmallConv(1, 9), loader, seed=seed, progress=False)
    calibrated = fb.calibrate(plain.model, (inputs[held_out], labels[held_out]), seed=seed, progress=False)
    return plain, calibrated


def confidence(posterior: Posterior, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the predicted classes and their probabilities."""
    probabilities = posterior.predict(inputs, samples=128, seed=0).probabilities
    return probabilities.argmax(-1), probabilities.max(-1).values


def accuracy_by_share(posterior: Posterior, inputs: Tensor, labels: Tensor) -> Tensor:
    """Returns the accuracy of the most confident answers, for every share of the inputs in ``FLOORS``."""
    predicted, probability = confidence(posterior, inputs)
    correct = (predicted == labels)[probability.argsort(descending=True)].double()
    accuracy = correct.cumsum(0) / torch.arange(1, len(correct) + 1)
    return accuracy[(FLOORS * len(correct)).long() - 1]


def draw_images(figure: plt.Figure, grid: object, plain: Posterior, calibrated: Posterior) -> None:
    """Draws known digits and eights with the answers of both networks."""
    digits = load_digits(novel=NOVEL)
    classes = [value for value in range(10) if value != NOVEL]
    known = [int((digits.test[1] == label).nonzero()[0]) for label in (0, 2, 3, 6)]
    images = torch.cat([digits.test[0][known], digits.novel[0][[0, 1, 2, 3, 4, 5]]])
    for column, image in enumerate(images):
        axes = figure.add_subplot(grid[0, column])
        axes.imshow(image[0], cmap="gray_r", interpolation="nearest")
        axes.set(xticks=[], yticks=[])
        for spine in axes.spines.values():
            spine.set_color("0.8")
        for row, (posterior, color) in enumerate(((plain, PLAIN), (calibrated, CALIBRATED))):
            label, probability = confidence(posterior, image[None])
            text = f"{classes[int(label)]}: {float(probability):.0%}"
            axes.text(0.5, -0.22 - 0.26 * row, text, color=color, ha="center", transform=axes.transAxes)
    for start, stop, text in ((0, 3, "digits of known classes"), (4, 9, "eights: never seen in training")):
        left, right = grid[0, start].get_position(figure), grid[0, stop].get_position(figure)
        figure.text((left.x0 + right.x1) / 2, left.y1 + 0.03, text, ha="center", fontsize=11)


def label_answers(figure: plt.Figure) -> None:
    """Draws the line below the images that says whose answers they are."""
    figure.text(0.5, 0.635, "answer and confidence of the trained network", color=PLAIN, ha="right")
    figure.text(0.52, 0.635, "and after fb.calibrate", color=CALIBRATED, ha="left")


def main() -> None:
    parser = make_parser(__doc__, seeds=5)
    parser.add_argument("--out", type=Path, default=Path("docs/images/readme.png"))
    arguments = parser.parse_args()
    digits = load_digits(novel=NOVEL)
    inputs = torch.cat([digits.test[0], digits.novel[0]])
    labels = torch.cat([digits.test[1], torch.full((len(digits.novel[0]),), -1)])
    fits = [fit(seed) for seed in range(arguments.seeds)]
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure = plt.figure(figsize=(11, 5.2), dpi=130)
    grid = figure.add_gridspec(1, 10, left=0.03, right=0.97, top=0.90, bottom=0.77, wspace=0.25)
    draw_images(figure, grid, *fits[0])
    label_answers(figure)
    axes = figure.add_axes((0.07, 0.10, 0.56, 0.47))
    for index, (name, color) in enumerate((("trained network", PLAIN), ("after fb.calibrate", CALIBRATED))):
        curves = torch.stack([accuracy_by_share(pair[index], inputs, labels) for pair in fits])
        axes.plot(FLOORS, curves.mean(0), color=color, lw=2, label=name)
        axes.fill_between(FLOORS, curves.amin(0), curves.amax(0), color=color, alpha=0.15, lw=0)
        for share in (0.5, 0.6, 0.7):
            print(f"{name}: accuracy {curves.mean(0)[(FLOORS - share).abs().argmin()]:.3f} at {share:.0%}")
    axes.axvline(len(digits.test[0]) / len(inputs), color="0.6", ls=":")
    axes.text(0.705, 0.995, "share of known digits", color="0.4", fontsize=9, va="top")
    axes.set(
        xlabel="share of the test stream that is answered, most confident first",
        ylabel="accuracy",
        xlim=(0.05, 1),
    )
    axes.legend(loc="lower left", frameon=False)
    means = {}
    for index, name in enumerate(("trained network", "after fb.calibrate")):
        rows = [fb.evaluate(pair[index], digits.test, progress=False) for pair in fits]
        means[name] = {key: sum(row[key] for row in rows) / len(rows) for key in ("accuracy", "nll", "ece")}
        confident = [(confidence(pair[index], digits.novel[0])[1] > 0.9).double().mean() for pair in fits]
        means[name]["eights above 90 %"] = float(torch.stack(confident).mean())
        print(name, {key: round(value, 3) for key, value in means[name].items()})
    rows = [
        ("NLL, known digits", "nll", "{:.2f}"),
        ("accuracy, known digits", "accuracy", "{:.1%}"),
        ("eights with confidence\nabove 90 %", "eights above 90 %", "{:.0%}"),
    ]
    for row, (text, key, form) in enumerate(rows):
        height = 0.47 - 0.135 * row
        figure.text(0.66, height, text, va="center")
        for x, name, color in ((0.85, "trained network", PLAIN), (0.94, "after fb.calibrate", CALIBRATED)):
            value = form.format(means[name][key])
            figure.text(x, height, value, color=color, fontsize=15, ha="center", va="center", weight="bold")
    figure.text(0.66, 0.08, f"means of {len(fits)} seeds", color="0.4", fontsize=9)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.out)


if __name__ == "__main__":
    main()
