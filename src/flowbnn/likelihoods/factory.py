"""Choice of an observation model by its name or by the targets."""

from typing import Any

from torch import Tensor

from flowbnn.errors import FlowBNNError, nearest
from flowbnn.likelihoods.base import Likelihood
from flowbnn.likelihoods.classes import SEVERAL_LABELS, Bernoulli, Categorical, is_one_hot
from flowbnn.likelihoods.regression import Gaussian
from flowbnn.options import all_subclasses, checked


@checked
def make_likelihood(
    likelihood: Likelihood | str | dict[str, Any],
    outputs: Tensor | None = None,
    targets: Tensor | None = None,
) -> Likelihood:
    """A likelihood from its name; ``"auto"`` looks at the targets: integers are classes, real numbers are regression.

    >>> import torch
    >>> make_likelihood("auto", torch.zeros(2, 3), torch.tensor([0, 1]))
    Categorical()
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    settings: dict[str, Any] = (
        dict(likelihood) if isinstance(likelihood, dict) else {"likelihood": likelihood}
    )
    name = str(settings.pop("likelihood", None)).lower()
    kinds: dict[str, Any] = {kind.__name__.lower(): kind for kind in all_subclasses(Likelihood)}  # type: ignore[type-abstract]
    kinds |= {"categorical": Categorical, "bernoulli": Bernoulli, "gaussian": Gaussian}
    problem = ""
    if name == "auto" and targets is None:
        problem = "likelihood='auto' needs targets to look at; say 'categorical', 'bernoulli' or 'gaussian'"
    elif name == "auto" and targets is not None and targets.is_floating_point():
        problem, name = _labels_as_floats(targets, outputs), "gaussian"
    elif name == "auto":
        single = outputs is not None and outputs.numel() == outputs.shape[0]
        name = "bernoulli" if single else "categorical"
    elif name not in kinds:
        problem = f"there is no likelihood '{name}'{nearest(name, ['auto', *kinds])}"
    if problem:
        raise FlowBNNError(problem, kind="targets" if name in kinds else "value", argument="likelihood")
    if name == "gaussian" and outputs is not None and settings.get("noise", "learned") == "learned":
        settings.setdefault("dim", outputs.shape[-1])
    shape = settings.pop("shape", None)  # of a file
    made = kinds[name](**settings)
    if isinstance(made, Gaussian) and shape is not None:
        made.shape = tuple(map(int, shape))
    return made


def _labels_as_floats(targets: Tensor, outputs: Tensor | None) -> str:
    """What to say where class labels come as floating point numbers, which would silently be taken for regression.

    A first batch of zeros alone counts as labels, too: positives may be rare.
    """
    if not targets.numel() or not bool(((targets == 0) | (targets == 1)).all()):
        return ""
    gaussian = "say likelihood='gaussian' if these are real numbers"
    if targets.ndim == 2 and targets.shape[1] > 1:
        if is_one_hot(targets):
            return f"the targets look like one-hot labels; give integers (targets.argmax(1)) for classes, or {gaussian}"
        if bool((targets == 0).any()) and bool((targets == 1).any()):
            return f"the targets are {targets.shape[1]} columns of 0 and 1: {SEVERAL_LABELS}; {gaussian}"
    if targets.numel() != len(targets):
        return ""
    labels = "likelihood='bernoulli' if these are labels (or give them as integers)"
    if outputs is not None and outputs.numel() > len(outputs):
        labels = "likelihood='categorical' if these are labels, and give them as integers (targets.long())"
    return f"the targets are real numbers, and those of the first batch are all 0 or 1; say {labels}, likelihood='gaussian' if not"
