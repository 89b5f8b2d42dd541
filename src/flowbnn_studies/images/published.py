"""Numbers from the literature that stand beside ours, each with its source."""

from dataclasses import dataclass, field

Curves = dict[str, tuple[float, ...]]

# Where the curves of figures 5 and 6 of Xiong's report were read off, to the precision of their pixels.
EPOCHS = (1, 6, 11, 16, 21, 26, 31, 36, 41, 46, 50)

LEVELS = {"plain": "Xiong: baseline", "dropout": "Xiong: dropout"}


@dataclass(frozen=True)
class Published:
    """What others report.

    Args:
        rows: final values of Xiong's report by variant.
        gaussian, flow: its curves by panel, for the Gaussian ("no flow") and the flow noise.
        target: what this study is to reach.
        cited: rows of other sources: a label, the method, and values by metric.
    """

    target: dict[str, float]
    rows: dict[str, dict[str, float]] = field(default_factory=dict)
    gaussian: Curves = field(default_factory=dict)
    flow: Curves = field(default_factory=dict)
    cited: tuple[tuple[str, str, dict[str, float]], ...] = ()

    def levels(self, panel: str) -> dict[str, float]:
        """The horizontal lines of Xiong's report in a panel, by name: of what it reports at the end only."""
        found = {words: self.rows.get(f"xiong-{key}", {}).get(panel) for key, words in LEVELS.items()}
        return {words: value for words, value in found.items() if value is not None}


def _curves(**panels: str) -> Curves:
    return {name: tuple(map(float, values.split())) for name, values in panels.items()}


FASHION = Published(
    rows={
        "xiong-plain": {"accuracy": 0.887, "ece": 0.015},
        "xiong-dropout": {"ece": 0.039},
        "xiong-gaussian-position": {"accuracy": 0.893, "ece": 0.045},
        "xiong-flow-position": {"accuracy": 0.902, "ece": 0.044},
    },
    gaussian=_curves(
        negative_elbo="0.795 0.431 0.353 0.306 0.268 0.242 0.216 0.190 0.170 0.151 0.137",
        log_likelihood="-0.795 -0.416 -0.336 -0.283 -0.250 -0.226 -0.194 -0.169 -0.152 -0.128 -0.117",
        kl="0.0004 0.0028 0.0043 0.0053 0.0060 0.0069 0.0078 0.0087 0.0097 0.0107 0.0114",
        accuracy="0.810 0.864 0.879 0.886 0.893 0.897 0.899 0.901 0.900 0.899 0.893",
        ece="0.089 0.043 0.021 0.008 0.008 0.007 0.013 0.021 0.024 0.036 0.045",
    ),
    flow=_curves(
        negative_elbo="0.765 0.394 0.324 0.277 0.240 0.216 0.188 0.166 0.148 0.131 0.113",
        log_likelihood="-0.765 -0.381 -0.306 -0.262 -0.228 -0.198 -0.175 -0.146 -0.127 -0.111 -0.093",
        kl="0.0008 0.0047 0.0067 0.0078 0.0087 0.0094 0.0104 0.0115 0.0124 0.0135 0.0142",
        accuracy="0.817 0.869 0.886 0.895 0.897 0.900 0.902 0.899 0.901 0.903 0.902",
        ece="0.072 0.036 0.009 0.014 0.011 0.009 0.019 0.026 0.031 0.038 0.044",
    ),
    target={"accuracy": 0.915, "ece": 0.008},
)

LENET_CIFAR10 = Published(
    rows={
        "xiong-plain": {"accuracy": 0.647, "ece": 0.015},
        "xiong-dropout": {"ece": 0.039},
        "xiong-gaussian-position": {"accuracy": 0.687, "ece": 0.015},
        "xiong-flow-position": {"accuracy": 0.7, "ece": 0.013},
    },
    gaussian=_curves(
        negative_elbo="1.720 1.372 1.256 1.179 1.120 1.078 1.038 1.020 0.996 0.967 0.958",
        log_likelihood="-1.720 -1.364 -1.250 -1.169 -1.117 -1.075 -1.033 -1.007 -0.975 -0.957 -0.947",
        kl="0.0002 0.0014 0.0027 0.0040 0.0052 0.0062 0.0073 0.0082 0.0092 0.0101 0.0107",
        accuracy="0.555 0.599 0.623 0.643 0.655 0.658 0.672 0.672 0.680 0.688 0.687",
        ece="0.166 0.111 0.074 0.066 0.047 0.036 0.028 0.018 0.019 0.014 0.015",
    ),
    flow=_curves(
        negative_elbo="1.720 1.313 1.204 1.127 1.082 1.045 1.010 0.991 0.967 0.943 0.935",
        log_likelihood="-1.720 -1.305 -1.191 -1.119 -1.060 -1.031 -0.992 -0.966 -0.948 -0.923 -0.914",
        kl="0.0005 0.0035 0.0063 0.0081 0.0093 0.0103 0.0111 0.0118 0.0124 0.0131 0.0135",
        accuracy="0.551 0.609 0.634 0.650 0.663 0.677 0.683 0.691 0.697 0.699 0.700",
        ece="0.122 0.103 0.055 0.033 0.036 0.040 0.022 0.033 0.019 0.012 0.013",
    ),
    target={"accuracy": 0.75, "ece": 0.01},
)

VGG16_CIFAR10 = Published(
    rows={
        "xiong-plain": {"accuracy": 0.87, "ece": 0.07},
        "xiong-gaussian-position": {"accuracy": 0.9, "ece": 0.034},
        "xiong-flow-position": {"accuracy": 0.905, "ece": 0.028},
    },
    gaussian=_curves(
        negative_elbo="1.270 0.682 0.528 0.431 0.358 0.305 0.261 0.218 0.190 0.161 0.152",
        log_likelihood="-1.270 -0.668 -0.515 -0.415 -0.340 -0.287 -0.243 -0.201 -0.175 -0.149 -0.136",
        kl="0.0011 0.0040 0.0061 0.0075 0.0087 0.0097 0.0103 0.0111 0.0117 0.0125 0.0130",
        accuracy="0.638 0.818 0.826 0.853 0.871 0.882 0.887 0.887 0.899 0.894 0.898",
        ece="0.016 0.027 0.011 0.010 0.012 0.013 0.016 0.022 0.021 0.031 0.034",
    ),
    flow=_curves(
        negative_elbo="1.505 0.742 0.590 0.489 0.410 0.352 0.307 0.270 0.235 0.212 0.185",
        log_likelihood="-1.430 -0.689 -0.538 -0.438 -0.364 -0.306 -0.262 -0.222 -0.187 -0.165 -0.150",
        kl="0.0750 0.0409 0.0434 0.0429 0.0408 0.0390 0.0380 0.0375 0.0365 0.0361 0.0356",
        accuracy="0.658 0.807 0.821 0.849 0.861 0.859 0.890 0.896 0.891 0.898 0.903",
        ece="0.076 0.052 0.012 0.019 0.012 0.019 0.010 0.017 0.018 0.018 0.028",
    ),
    target={"accuracy": 0.945, "nll": 0.175, "ece": 0.008},
    # Trinh, Kaski and Heinonen (2020, https://arxiv.org/abs/2010.13498), tables 3 to 7: 5 seeds, 300 epochs
    cited=(
        ("Trinh et al.: SGD", "mle", {"accuracy": 0.9328, "nll": 0.3255, "ece": 0.0476}),
        ("Trinh et al.: MC dropout", "mc-dropout", {"accuracy": 0.9329, "nll": 0.2887, "ece": 0.0421}),
        (
            "Trinh et al.: iBNN, 16 components",
            "node-noise-mixture",
            {"accuracy": 0.9381, "nll": 0.1983, "ece": 0.0149},
        ),
    ),
)

RESNET18_CIFAR10 = Published(
    target={"nll": 0.120, "ece": 0.006},
    # Trinh et al. (2024, FoRDE, https://arxiv.org/abs/2306.02775), table 2, which has node-BNN (https://arxiv.org/abs/2206.02435)
    cited=(
        ("Published: node-BNN", "node-noise-gaussian", {"accuracy": 0.959, "nll": 0.127, "ece": 0.006}),
        ("Published: SWAG", "swag", {"accuracy": 0.969, "nll": 0.124, "ece": 0.005}),
        ("Published: deep ensemble", "deep-ensemble", {"accuracy": 0.963, "nll": 0.117, "ece": 0.005}),
    ),
)
