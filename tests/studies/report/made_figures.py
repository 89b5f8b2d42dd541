"""Made-up figures of every kind, shaped like the real ones."""

from typing import Any

import numpy as np

MODELS = ("Plain MLP", "Stochastic MLP")


def value(mean: float | None, std: float | None = None, published: float | None = None) -> dict[str, Any]:
    spread = std or 0.0
    seeds = [] if mean is None else [mean + spread * step for step in (-1.2, -0.6, 0.1, 0.6, 1.1)]
    return {"mean": mean, "std": std, "per_seed": seeds, "published": published}


def bins(sharpness: float, gap: float) -> list[dict[str, Any]]:
    edges = np.linspace(0, 1, 16)
    share = np.where(edges[:-1] >= 0.46, np.exp(sharpness * edges[:-1]), 0.0)
    share /= share.sum()
    made = []
    for low, high, part in zip(edges[:-1], edges[1:], share, strict=True):
        middle = float((low + high) / 2)
        accuracy = float(np.clip(middle + gap * 4 * middle * (1 - middle), 0, 1))
        full = part > 0
        made.append(
            {
                "low": float(low),
                "high": float(high),
                "fraction": float(part),
                "confidence": middle if full else None,
                "accuracy": accuracy if full else None,
            }
        )
    return made


def curves_figure() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    epochs = np.arange(1, 51)
    panels = []
    for title, start, end, log in (
        ("Negative ELBO", 0.5, 0.1, False),
        ("Log-likelihood", -0.5, -0.1, False),
        ("KL", 1e-4, 2e-3, True),
    ):
        lines = []
        for length in (0, 3, 6, 9, 12, 15):
            noise = rng.normal(0, 0.012 * abs(start - end), 50)
            mean = end + (start - end) * np.exp(-epochs / (14 - length / 2)) + noise
            std = 0.05 * abs(start - end) * np.exp(-epochs / 30) + 0.01 * abs(start - end)
            lines.append(
                {
                    "label": f"Length {length}",
                    "x": epochs.tolist(),
                    "mean": mean.tolist(),
                    "std": std.tolist(),
                }
            )
        panels.append({"title": title, "y_label": "nats per example", "log": log, "lines": lines})
    panels[0]["lines"][3]["mean"][4] = None
    data = {"x_label": "epoch", "y_label": "", "panels": panels}
    caption = "Mean over 5 seeds, the band is one standard deviation to either side."
    return {
        "kind": "curves",
        "title": "Training with planar flows of six lengths",
        "caption": caption,
        "data": data,
    }


def reliability_figure(labels: tuple[str, ...] = MODELS) -> dict[str, Any]:
    models = [
        {"label": label, "ece": 0.094 / (index + 1) ** 2, "bins": bins(4 + 4 * index, 0.2 / (index + 1))}
        for index, label in enumerate(labels)
    ]
    return {
        "kind": "reliability",
        "title": "Is a confidence of 90 % right nine times in ten?",
        "caption": "Accuracy in each of 15 equal bins of confidence.",
        "data": {"models": models},
    }


def histogram_figure(labels: tuple[str, ...] = MODELS) -> dict[str, Any]:
    edges = np.linspace(0, 2.2, 24)
    panels = []
    for index, label in enumerate(labels):
        groups = []
        for name, centre in (("known digits", 0.12), ("novel digit", 0.5 + 0.3 * index)):
            height = np.exp(-(((edges[:-1] - centre) / (0.2 + centre / 3)) ** 2))
            height = (height / height.sum()).tolist()
            groups.append({"label": name, "edges": edges.tolist(), "fraction": height})
        panels.append({"title": label, "groups": groups})
    return {
        "kind": "histogram",
        "title": "Entropy of known and novel inputs",
        "caption": "A network that knows what it has not seen puts the novel class to the right.",
        "data": {"x_label": "predictive entropy, nats", "panels": panels},
    }


def confidence_figure(labels: tuple[str, ...] = MODELS) -> dict[str, Any]:
    edges = np.linspace(0, 1, 16)
    panels = []
    for index, label in enumerate(labels):
        height = np.exp((4 + 3 * index) * edges[:-1])
        group = {"label": "test set", "edges": edges.tolist(), "fraction": (height / height.sum()).tolist()}
        panels.append({"title": label, "groups": [group]})
    data = {"x_label": "confidence", "panels": panels}
    return {"kind": "histogram", "title": "How confident they are", "caption": "Test set.", "data": data}


def density_figure(pairs: bool = True) -> dict[str, Any]:
    x = np.linspace(-1, 3, 161)

    def bell(centre: float, width: float) -> np.ndarray:
        return np.exp(-0.5 * ((x - centre) / width) ** 2) / (width * np.sqrt(2 * np.pi))

    prior = bell(1, 0.5)
    shapes = (
        ("fc1, noise dimension 3", bell(1.1, 0.22), 1),
        ("fc1, noise dimension 8", 0.6 * bell(0.3, 0.2) + 0.4 * bell(1.6, 0.3), 2),
        ("fc2, noise dimension 0", 0.3 * bell(0, 0.2) + 0.4 * bell(1, 0.18) + 0.3 * bell(2, 0.2), 3),
    )
    panels = [
        {
            "title": title,
            "x": x.tolist(),
            "posterior": height.tolist(),
            "prior": prior.tolist(),
            "modes": modes,
        }
        for title, height, modes in shapes
    ]
    data: dict[str, Any] = {"panels": panels}
    if pairs:
        grid = np.linspace(-1, 3, 41)
        across, up = np.meshgrid(grid, grid)
        height = np.exp(-(((across - 0.4) / 0.4) ** 2) - ((up - 0.6 - 0.5 * across) / 0.3) ** 2)
        height += 0.7 * np.exp(-(((across - 1.8) / 0.4) ** 2) - ((up - 1.5) / 0.4) ** 2)
        pair = {"title": "fc1, dimensions 3 and 8", "x_label": "z 3", "y_label": "z 8"}
        data["pairs"] = [{**pair, "x": grid.tolist(), "y": grid.tolist(), "density": height.tolist()}]
    return {
        "kind": "density",
        "title": "Has the noise more than one mode?",
        "caption": "Posterior of single noise dimensions against their prior N(1, 0.5²).",
        "data": data,
    }


def field_figure() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    centres = np.array([[-4.5, 3.0], [3.5, 3.0], [5.0, -3.0], [-3.0, -3.0]])
    kind = rng.integers(0, 4, 1500)
    points = centres[kind] + rng.normal(0, 1.6, (1500, 2))
    axis = np.linspace(-8, 8, 45)
    grid = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
    side = np.minimum(0.2 - grid[:, 1], 1.2 - grid[:, 0] - 0.25 * grid[:, 1])
    models = []
    for index, label in enumerate(MODELS):
        spread = np.exp(-((side / (0.5 + 0.15 * np.abs(grid[:, 0]))) ** 2)) * 0.21
        models.append(
            {
                "label": label,
                "accuracy": 0.953 + 0.001 * index,
                "ece": 0.094 if index == 0 else 0.009,
                "points": points.round(3).tolist(),
                "point_class": (kind == 3).astype(int).tolist(),
                "grid": grid.round(3).tolist(),
                "grid_class": (side > 0).astype(int).tolist(),
                "grid_uncertainty": spread.round(4).tolist() if index else None,
                "bins": bins(4 + 14 * index, 0.2 if index == 0 else -0.03),
            }
        )
    return {
        "kind": "field",
        "title": "Where each network decides, and where it doubts",
        "caption": "Four Gaussian blobs, one of them the second class. Left: decisions on a grid over the data; "
        "middle: share of test samples per confidence; right: accuracy per confidence.",
        "data": {"models": models},
    }


def images_figure() -> dict[str, Any]:
    rng = np.random.default_rng(2)
    panels = []
    for index, title in enumerate(
        ("Known: a 3, and it is sure", "Known: a 5", "Novel: a 9 it has never seen")
    ):
        odds = rng.dirichlet(np.full(9, (0.05, 0.2, 1.2)[index]))
        bars = [{"label": str(digit), "value": float(part)} for digit, part in enumerate(odds)]
        panels.append({"title": title, "pixels": rng.integers(0, 17, (8, 8)).tolist(), "bars": bars})
    caption = "Images beside the probabilities that the flow network gives them."
    return {"kind": "images", "title": "A few examples", "caption": caption, "data": {"panels": panels}}


def bands_figure(labels: tuple[str, ...]) -> dict[str, Any]:
    x = np.linspace(-0.25, 0.75, 41)
    points = {"x": [0.1, 0.2, 0.4], "y": [0.5, 0.6, 0.3]}
    panels = []
    for index, label in enumerate(labels):
        spread = 0.1 * index * (1 + 5 * np.abs(x - 0.25))
        panels.append(
            {
                "title": label,
                "note": "× 2.0" if index else "",
                "x": x.tolist(),
                "mean": np.sin(6 * x).tolist(),
                "epistemic": spread.tolist(),
                "total": (spread + 0.06).tolist(),
                "points": points,
            }
        )
    truth = {"x": x.tolist(), "y": np.sin(6 * x).tolist()}
    data = {"x_label": "x", "span": [0.0, 0.5], "truth": truth, "panels": panels}
    return {"kind": "bands", "title": "What each method says", "caption": "Bands.", "data": data}


def map_figure(labels: tuple[str, ...]) -> dict[str, Any]:
    axis = np.linspace(-20, 20, 9)
    panels = [
        {
            "title": label,
            "note": "AUROC 0.50",
            "values": (0.05 * index * np.abs(axis[:, None] - axis)).tolist(),
        }
        for index, label in enumerate(labels)
    ]
    data = {
        "label": "entropy in nats",
        "top": 0.693,
        "x": axis.tolist(),
        "y": axis.tolist(),
        "points": [[1.0, 2.0], [-3.0, 1.0]],
        "point_class": [0, 1],
        "ring": 15.0,
        "panels": panels,
    }
    return {"kind": "map", "title": "Where each is unsure", "caption": "Maps.", "data": data}


def draws_figure(labels: tuple[str, ...]) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    images = [{"title": title, "pixels": rng.random((8, 8)).tolist()} for title in ("a 3", "an unseen 8")]
    panels = [
        {
            "title": label,
            "sides": [
                {"note": "entropy* 0.1", "samples": rng.dirichlet(np.ones(9), 5).tolist()} for _ in range(2)
            ],
        }
        for label in labels
    ]
    data = {"classes": list("012345679"), "images": images, "panels": panels}
    return {"kind": "draws", "title": "Two images", "caption": "Draws.", "data": data}


def pareto_figure(labels: tuple[str, ...]) -> dict[str, Any]:
    items = [
        {"label": label, "colour": "green", "x": 1.0 + 0.02 * index, "y": 0.3 - 0.01 * index}
        for index, label in enumerate(labels)
    ]
    panel = {"title": "NLL against time", "x_label": "times", "y_label": "NLL", "items": items}
    data = {"families": [{"label": "ensembles", "colour": "green"}], "panels": [panel]}
    return {"kind": "pareto", "title": "What it costs", "caption": "Front.", "data": data}
