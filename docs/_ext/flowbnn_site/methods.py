r"""One page for each method: formula, use, cost, paper and arguments.

Costs and papers come from the table of ``docs/methods.md``, arguments and examples from the docstrings.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from flowbnn_site.api import gallery_picture, write


@dataclass(frozen=True)
class MethodPage:
    """Text of a page that no docstring has.

    Args:
        title: Name of the method in words.
        formula: Approximate posterior, in TeX.
        explanation: Symbols of the formula.
        use: Cases in which to use the method.
        avoid: Cases in which to use another method.
    """

    title: str
    formula: str
    explanation: str
    use: str
    avoid: str


PAGES = {
    "NodeNoise": MethodPage(
        "Node noise",
        r"h_l = W_l (z_l \odot h_{l-1}) + b_l, \qquad \max_{q, W}\; \mathbb E_{q(z)} \log p(\mathcal D \mid z, W) - \mathrm{KL}\left(q(z) \,\|\, p(z)\right)",
        r"Noise $z_l$ multiplies the input of layer $l$. Its posterior $q$ is a Gaussian, a mixture or a normalizing flow. Its prior is $\mathcal N(1, 0.5^2)$.",
        "You want one network with little overhead, or you calibrate a finished network (`fb.calibrate`).",
        "You need several modes of the weights. Noise varies one network; a deep ensemble has several.",
    ),
    "MLE": MethodPage(
        "Maximum likelihood",
        r"\hat w = \arg\max_w \sum_{n=1}^N \log p(y_n \mid x_n, w)",
        r"The training data are $(x_n, y_n)$, the weights $w$.",
        "You need the deterministic baseline, or a trained network to calibrate.",
        "You need epistemic uncertainty. One network has none.",
    ),
    "MAP": MethodPage(
        "Maximum a posteriori",
        r"\hat w = \arg\max_w \sum_{n=1}^N \log p(y_n \mid x_n, w) - \frac{\lVert w \rVert^2}{2 \sigma^2}",
        r"The prior scale $\sigma$ is `prior_scale`. It acts as a weight decay of $1 / \sigma^2 N$.",
        "You need a regularized baseline, or the mode that a Laplace approximation starts from.",
        "You need epistemic uncertainty. One network has none.",
    ),
    "DAMP": MethodPage(
        "DAMP",
        r"w \leftarrow w - \eta\, \nabla_w \mathcal L(w \odot \xi), \qquad \xi \sim \mathcal N(1, \sigma^2 I)",
        r"The gradient is taken at weights that are multiplied by fresh noise $\xi$, and applied to the weights themselves.",
        "Inputs are corrupted at test time, and prediction must cost one pass.",
        "You need epistemic uncertainty. The result is one network.",
    ),
    "Temperature": MethodPage(
        "Temperature scaling",
        r"p(y \mid x) = \mathrm{softmax}\left(f(x) / T\right)_y, \qquad T = \arg\max_T \sum_{n \in \text{held out}} \log p(y_n \mid x_n)",
        r"One number $T$ divides the logits $f(x)$. For a regression it multiplies the predictive standard deviation.",
        "You only need calibrated probabilities, or have fewer than about 100 held-out examples.",
        "Errors differ between classes. A temperature changes no ranking and no decision.",
    ),
    "VectorScaling": MethodPage(
        "Vector scaling",
        r"p(y \mid x) = \mathrm{softmax}\left(a \odot \log p_0(x) + b\right)_y",
        r"Each class has a factor $a_k$ and an offset $b_k$. A penalty pulls them towards temperature scaling. $p_0$ is the prediction of the network.",
        "Some classes are predicted too often, and you have some hundred held-out examples.",
        "The task is a regression.",
    ),
    "MatrixScaling": MethodPage(
        "Matrix scaling",
        r"p(y \mid x) = \mathrm{softmax}\left(A \log p_0(x) + b\right)_y",
        r"The matrix $A$ mixes the log-probabilities of all classes. Entries outside its diagonal have a larger penalty.",
        "The network confuses particular pairs of classes, and you have a thousand held-out examples.",
        "There are hundreds of classes. The matrix has the square of their number of entries.",
    ),
    "LastLayerRefit": MethodPage(
        "Last-layer refit",
        r"\hat W = \arg\min_W -\sum_{n \in \text{held out}} \log p\left(y_n \mid W \phi(x_n)\right) + \lambda \lVert W - W_0 \rVert^2",
        r"$\phi(x)$ are the inputs of the last layer. The penalty $\lambda$ and the center $W_0$ are chosen by cross-validation.",
        "You have held-out data, and the last layer may change.",
        "There are fewer held-out examples than classes.",
    ),
    "MCDropout": MethodPage(
        "MC dropout",
        r"p(y \mid x) \approx \frac1S \sum_{s=1}^S p(y \mid x, w \odot m_s), \qquad m_s \sim \mathrm{Bernoulli}(1 - p)",
        r"Each sample has masks $m_s$ that drop inputs of layers with probability $p$.",
        "The network was trained with dropout. It then costs nothing to fit.",
        "You fit a precise regression. The fixed rate determines the spread of the networks.",
    ),
    "DeepEnsemble": MethodPage(
        "Deep ensemble",
        r"p(y \mid x) = \frac1M \sum_{m=1}^M p(y \mid x, \hat w_m)",
        r"Each of the $M$ networks $\hat w_m$ has its own initialization and order of the data.",
        "You can train, store and run five networks. It is the strongest baseline in most comparisons.",
        "The network is given and cannot be trained again.",
    ),
    "ModeEnsemble": MethodPage(
        "Mode ensemble",
        r"q(z) = \frac1M \sum_{m=1}^M \delta_{\hat z_m}, \qquad \hat z_m = \text{local maximum of } \log p(\mathcal D \mid z, \hat w) + \log p(z)",
        r"The weights $\hat w$ are shared. Only the noise vectors $\hat z_m$ differ. `width=\"laplace\"` puts a Gaussian at each.".replace(
            '\\"', '"'
        ),
        "The posterior of the noise has several modes, and you want an ensemble that stores one network.",
        "One mode explains the data (`fb.diagnostics.count_modes`). Gaussian noise is then simpler and as good.",
    ),
    "SWAG": MethodPage(
        "SWAG",
        r"q(w) = \mathcal N\left(\bar w,\; \tfrac12 \mathrm{diag}(\hat\sigma^2) + \tfrac{1}{2(K-1)} D D^\top\right)",
        r"$\bar w$ and $\hat\sigma^2$ are the mean and variance of iterates of SGD, $D$ has the last $K$ deviations.",
        "You train with SGD, and can afford some epochs more with a constant rate.",
        "The network has no training run left. SWAG needs iterates.",
    ),
    "Laplace": MethodPage(
        "Laplace approximation",
        r"q(w) = \mathcal N\left(\hat w,\; (H + \sigma^{-2} I)^{-1}\right), \qquad H = \sum_n J_n^\top \Lambda_n J_n",
        r"$H$ is the generalized Gauss-Newton matrix at the trained weights $\hat w$, with Jacobians $J_n$ and curvatures $\Lambda_n$ of the likelihood.",
        "The network is trained, and its weights must not change. The last layer costs one pass over the data.",
        "All layers of a large network must be linearized for each prediction. That costs many passes.",
    ),
    "BayesByBackprop": MethodPage(
        "Bayes by Backprop",
        r"q(w) = \prod_i \mathcal N(w_i; \mu_i, \sigma_i^2), \qquad \max_{\mu, \sigma}\; \mathbb E_q \log p(\mathcal D \mid w) - \mathrm{KL}\left(q \,\|\, p\right)",
        r"Every weight has a mean $\mu_i$ and a standard deviation $\sigma_i$.",
        "You want a Gaussian over every weight, the classic variational method.",
        "The network is large or well trained. The KL of all weights often dominates the data.",
    ),
    "IVON": MethodPage(
        "IVON",
        r"q(w) = \prod_i \mathcal N\left(w_i; m_i, \frac{1}{N (h_i + \delta)}\right), \qquad \hat h_i = \hat g_i\, \epsilon_i / \sigma_i",
        r"The Hessian $h$ is a running mean of estimates $\hat h$ from the gradient $\hat g$ at a draw $m + \sigma \epsilon$. The prior has the precision $N \delta$.",
        "You want a Gaussian over every weight, and train from the start with an optimizer that replaces Adam.",
        "Training is short. The Hessian needs many steps to forget its initial value.",
    ),
    "VBLL": MethodPage(
        "Variational Bayesian last layer",
        r"q(W) = \prod_k \mathcal N(w_k; \bar w_k, S_k), \qquad z_k = w_k^\top \phi(x)",
        r"The features $\phi$ are deterministic. They are trained together with the means $\bar w_k$ and covariances $S_k$ of the last layer, on a bound without samples.",
        "All samples of a prediction must cost one pass, and the network is still to be trained.",
        "The network must not change. Use a Laplace approximation of the last layer.",
    ),
    "MNF": MethodPage(
        "Multiplicative normalizing flows",
        r"q(w) = \int q(w \mid z)\, q(z)\, dz, \qquad w_{ij} \sim \mathcal N(z_i \mu_{ij}, \sigma_{ij}^2)",
        r"A flow $q(z)$ correlates the Gaussians over the weights of a layer.",
        "You want flows over the weights rather than over nodes.",
        "Training time matters. It takes about four times as long as the deterministic network.",
    ),
    "SGLD": MethodPage(
        "SGLD",
        r"w \leftarrow w + \tfrac{\epsilon}{2} \nabla_w \log p(w \mid \mathcal D) + \sqrt{\epsilon}\, \xi, \qquad \xi \sim \mathcal N(0, I)",
        r"The gradient is estimated on batches. States of the chain are the posterior samples.",
        "You want posterior samples at the cost of SGD.",
        "You need a reference posterior. Steps are biased; use HMC or NUTS.",
    ),
    "HMC": MethodPage(
        "Hamiltonian Monte Carlo",
        r"\dot w = M^{-1} r, \qquad \dot r = \nabla_w \log p(w \mid \mathcal D), \qquad r \sim \mathcal N(0, M)",
        r"Leapfrog steps follow these equations, and a Metropolis test corrects their error. The step size and the mass $M$ are adapted.",
        "The network is small, and you want a reference posterior.",
        "The data do not fit into one batch, or the network has more than some thousand weights.",
    ),
    "NUTS": MethodPage(
        "No-U-Turn sampler",
        r"\text{stop if } (w^+ - w^-) \cdot r^- < 0 \;\text{ or }\; (w^+ - w^-) \cdot r^+ < 0",
        r"HMC whose trajectories grow in both directions until their ends $w^-$ and $w^+$ turn towards each other.",
        "The network is small, and the number of steps of HMC would have to be tuned.",
        "The data do not fit into one batch, or the network has more than some thousand weights.",
    ),
}


def table_row(text: str, name: str) -> dict[str, str]:
    """Returns the row of a method in the table of ``docs/methods.md`` by the heads of its columns.

    Args:
        text: Content of ``docs/methods.md``.
        name: Name of the class.
    """
    lines = [line for line in text.splitlines() if line.startswith("|")]
    start = next(place for place, line in enumerate(lines) if line.startswith("| method | paper |"))
    heads = [head.strip() for head in lines[start].strip("|").split("|")]
    for line in lines[start + 2 :]:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if re.search(rf"`{name}\b", cells[0]):
            return dict(zip(heads, cells, strict=True))
    raise LookupError(f"docs/methods.md has no row for {name}")


def _page(name: str, number: int, page: MethodPage, row: dict[str, str]) -> str:
    paper = row["paper"] or "none"
    facts = [f"**Use when:** {page.use}", f"**Use another method when:** {page.avoid}"]
    facts += [f"**Represents:** {row['representation']}", f"**Paper:** {paper}"]
    facts += [f"**Training time**, relative to the deterministic network: {row['training']}"]
    facts += [f"**Prediction:** {row['prediction']}"]
    return "\n".join(
        [
            f"# {page.title}: `fb.{name}`",
            "",
            f"$$\n{page.formula}\n$$",
            "",
            page.explanation,
            "",
            *(f"- {fact}" for fact in facts),
            "",
            "Times were measured for LeNet on digits ([all methods](../../methods.md#choosing-a-method)).",
            "",
            *gallery_picture(
                "plot_15_method_maps", number, f"Predictions of {page.title} for two classes of points"
            ),
            "## Arguments",
            "",
            f"All arguments of [`fb.{name}`](../api/flowbnn/{name}.rst):",
            "",
            "```{eval-rst}",
            f".. autoclass:: flowbnn::{name}",
            "   :no-index:",
            "```",
            "",
        ]
    )


def write_pages(docs: Path, folder: Path) -> None:
    """Writes a page for each method and their index.

    Args:
        docs: Folder of the documentation.
        folder: Folder of the pages.
    """
    text = (docs / "methods.md").read_text(encoding="utf-8")
    rows = ["| method | use when |", "|---|---|"]
    for number, (name, page) in enumerate(PAGES.items(), start=1):
        write(folder / f"{name}.md", _page(name, number, page, table_row(text, name)))
        rows.append(f"| [{page.title}]({name}.md) (`fb.{name}`) | {page.use} |")
    toctree = ["```{toctree}", ":hidden:", "", *PAGES, "```"]
    intro = "Each page has the formula, the cost, the paper and all arguments. [Choose a method](../../choose-a-method.md) compares them."
    write(folder / "index.md", "\n".join(["# Methods, a page each", "", intro, "", *rows, "", *toctree, ""]))
