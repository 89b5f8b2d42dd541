"""Made-up results, shaped like the real ones."""

from typing import Any

from made_figures import (
    MODELS,
    bands_figure,
    confidence_figure,
    curves_figure,
    density_figure,
    draws_figure,
    field_figure,
    histogram_figure,
    images_figure,
    map_figure,
    pareto_figure,
    reliability_figure,
    value,
)


def base(study: str, title: str, labels: tuple[str, ...]) -> dict[str, Any]:
    metrics = [
        (
            "accuracy",
            "Accuracy",
            "higher",
            "Share of test samples whose most probable class is the right one.",
        ),
        ("nll", "NLL", "lower", "Mean negative log-likelihood of the right class, in nats."),
        ("ece", "ECE", "lower", "Expected calibration error: the gap between confidence and accuracy."),
        ("parameters", "Parameters", "none", "Trained numbers in the network."),
    ]
    rows = []
    for index, label in enumerate(labels):
        values = {
            "accuracy": value(0.9531 + 0.0017 * index, 0.0023, 0.953 if index == 0 else None),
            "nll": value(0.1871 - 0.03 * index, 0.0104),
            "ece": value(0.0943 / (index + 1) ** 2, 0.0051, (0.094, 0.009)[index] if index < 2 else None),
            "parameters": value(1234 + 56 * index),
        }
        rows.append({"key": label.lower().replace(" ", "-"), "label": label, "values": values})
    return {
        "schema": 1,
        "study": study,
        "title": title,
        "question": "Does noise from a flow make a small network's confidence match how often it is right?",
        "answer": "Yes: over 5 seeds the calibration error falls from 0.094 to 0.024 while accuracy stays at 95 %. "
        "The uncertainty sits on the boundary, where the classes overlap, and is small elsewhere.",
        "source": "document 000, figure 3",
        "command": f"flowbnn run {study}",
        "created": "2026-11-15T02:10:00+00:00",
        "seconds": 41.3,
        "device": "cpu, 2 threads",
        "versions": {"flowbnn": "0.1.0", "torch": "2.13.0", "python": "3.11.9"},
        "seeds": [0, 1, 2, 3, 4],
        "settings": {
            "data": {"samples": 8000, "spread": 1.6},
            "train": {"epochs": 20, "rates": [0.01, 0.001]},
        },
        "metrics": [
            dict(zip(("key", "label", "better", "definition"), metric, strict=True), format=".3f")
            for metric in metrics[:3]
        ]
        + [
            {**dict(zip(("key", "label", "better", "definition"), metrics[3], strict=True)), "format": ",.0f"}
        ],
        "rows": rows,
        "figures": [],
        "notes": [
            "The published ECE of 0.009 was not reached; longer training and a smaller prior were tried."
        ],
    }


def make_two_clusters() -> dict[str, Any]:
    results = base("two-clusters", "Two classes on a plane", MODELS)
    results["figures"] = [field_figure(), reliability_figure(), confidence_figure(), density_figure()]
    return results


def make_digits() -> dict[str, Any]:
    labels = ("Plain network", "Dropout", "Gaussian noise", "Flow noise")
    results = base("digits", "Handwritten digits with one class held out", labels)
    results["figures"] = [
        reliability_figure(labels),
        histogram_figure(labels),
        confidence_figure(labels),
        density_figure(pairs=False),
        images_figure(),
    ]
    return results


def make_flow_length() -> dict[str, Any]:
    labels = tuple(f"Length {length}" for length in (0, 3, 6, 9, 12, 15))
    results = base("flow-length", "How long a flow should be", labels)
    results["figures"] = [curves_figure()]
    return results


def make_lenet() -> dict[str, Any]:
    """Groups of metrics, cited rows, paired comparisons, bars, and curves beside those of others."""
    labels = ("Gaussian noise", "Flow noise")
    results = base("lenet", "LeNet on pictures", labels)
    results["metrics"][2]["group"] = results["metrics"][3]["group"] = "Elsewhere"
    for row, colour in zip(results["rows"], ("blue", "vermillion"), strict=True):
        row["colour"] = colour
    cited = {"accuracy": {"mean": None, "std": None, "per_seed": [], "published": 0.999}}
    results["rows"].append({"key": "cited", "label": "Of others", "values": cited, "cited": "yes"})
    results["comparisons"] = [
        {
            "title": "flow − Gaussian",
            "metric": "accuracy",
            "mean": 0.02,
            "low": 0.01,
            "high": 0.03,
            "p": 0.0625,
            "number": 5,
        },
        {
            "title": "flow − Gaussian",
            "metric": "ece",
            "mean": -0.001,
            "low": -0.02,
            "high": 0.018,
            "p": 1.0,
            "number": 5,
        },
        {
            "title": "Gaussian − plain",
            "metric": "ece",
            "mean": 0.5,
            "low": None,
            "high": None,
            "p": None,
            "number": 1,
        },
    ]
    lines = [{"label": label, "x": [1, 2, 3], "mean": [0.1, 0.2, 0.3], "std": [0.01] * 3} for label in labels]
    other = {
        "label": "Document: flow",
        "x": [1, 3],
        "mean": [0.2, 0.4],
        "style": "dashed",
        "like": "Flow noise",
    }
    panel = {"title": "Accuracy", "lines": [*lines, other], "levels": [{"label": "baseline", "value": 0.25}]}
    bars = {
        "title": "Step",
        "x_label": "over plain",
        "level": 1.0,
        "bars": [{"label": "Flow noise", "value": 1.31}],
    }
    results["figures"] = [
        {
            "kind": "curves",
            "title": "Redrawn",
            "data": {"x_label": "epoch", "columns": 4, "panels": [panel] * 4},
        },
        {"kind": "bars", "title": "Cost", "caption": "Ratios.", "data": {"panels": [bars]}},
    ]
    return results


def make_rivals() -> dict[str, Any]:
    """Galleries of methods."""
    labels = ("Maximum likelihood", "MC dropout", "Deep ensemble of 5", "Node noise, planar flow")
    results = base("rivals", "All methods", labels)
    results["figures"] = [
        bands_figure(labels),
        map_figure(labels),
        draws_figure(labels),
        pareto_figure(labels),
    ]
    return results
