r"""Scores from the confusion matrix: intersection over union (IoU) of segmentations, and F1 scores of taggers and multi-label networks.

All functions take predicted labels, ``prediction.labels``, and targets of the same shape. Targets with the label -100 are left out.
"""

from typing import Literal

import torch
from torch import Tensor

from flowbnn.errors import check_entries, check_shape
from flowbnn.metrics.checks import IGNORED, check_any_target, check_integers
from flowbnn.options import Count, checked


@checked
def confusion_matrix(labels: Tensor, targets: Tensor, classes: Count | None = None) -> Tensor:
    """Returns the number of targets of each class (row) that have each predicted label (column), ``[C, C]``.

    Args:
        labels: Predicted labels of any shape, such as ``prediction.labels``.
        targets: Class indices of the same shape. The label -100 is ignored.
        classes: Number of classes. The default is the largest label or target plus one.

    Raises:
        FlowBNNError: If the shapes differ, if a label is invalid, or if all targets are ignored.

    >>> confusion_matrix(torch.tensor([[0, 1], [1, 1]]), torch.tensor([[0, 1], [0, -100]]))
    tensor([[1, 1],
            [0, 1]])
    """
    check_shape("targets", targets, tuple(labels.shape))
    check_integers("labels", labels)
    check_integers("targets", targets)
    valid = targets != IGNORED
    check_any_target(valid)
    rows, columns = targets[valid].long(), labels[valid].long().to(targets.device)
    number = 1 + int(max(rows.max(), columns.max())) if classes is None else classes
    for name, values in (("targets", rows), ("labels", columns)):
        check_entries(name, values, (values >= 0) & (values < number), f"from 0 to {number - 1}")
    return torch.bincount(number * rows + columns, minlength=number**2).reshape(number, number).cpu()


@checked
def intersection_over_union(labels: Tensor, targets: Tensor, classes: Count | None = None) -> Tensor:
    r"""Returns the intersection over union (Jaccard index) of each class, ``[C]``, over all positions of all inputs.

    .. math:: \mathrm{IoU}_c = \frac{\mathrm{TP}_c}{\mathrm{TP}_c + \mathrm{FP}_c + \mathrm{FN}_c}

    A class that is neither predicted nor a target has the value NaN, so that ``iou.nanmean()`` is the mean IoU of the present classes.

    Args:
        labels: Predicted labels ``[B, *positions]``, such as ``prediction.labels``.
        targets: Class indices of the same shape. The label -100 is ignored.
        classes: Number of classes. The default is the largest label or target plus one.

    >>> intersection_over_union(torch.tensor([[0, 1, 1, 1]]), torch.tensor([[0, 1, 1, 0]]))
    tensor([0.5000, 0.6667], dtype=torch.float64)
    """
    matrix = confusion_matrix(labels, targets, classes).double()
    hits = matrix.diagonal()
    return hits / (matrix.sum(0) + matrix.sum(1) - hits)


@checked
def f1_score(
    labels: Tensor,
    targets: Tensor,
    average: Literal["micro", "macro"] = "macro",
    multilabel: bool = False,
) -> float:
    r"""Returns the F1 score, the harmonic mean of precision and recall.

    .. math:: F_1 = \frac{2\,\mathrm{TP}}{2\,\mathrm{TP} + \mathrm{FP} + \mathrm{FN}}

    ``"macro"`` averages the scores of the classes, ``"micro"`` adds their counts first. For classes that exclude each other the micro
    average is the accuracy. As in scikit-learn, a class that is neither predicted nor a target is left out, and a label of several that
    is never 1 has the score 0.

    Args:
        labels: Predicted labels, such as ``prediction.labels``.
        targets: Class indices of the same shape. The label -100 is ignored.
        average: Average over classes, or over labels with ``multilabel``.
        multilabel: If True, the last axis is several labels 0 or 1 of an input, ``[B, L]``, and only the class 1 of each label counts.

    >>> labels, targets = torch.tensor([[1, 0], [1, 1]]), torch.tensor([[1, 0], [0, 1]])
    >>> round(f1_score(labels, targets, "micro", multilabel=True), 4), round(f1_score(labels, targets, multilabel=True), 4)
    (0.8, 0.8333)
    """
    if multilabel:
        check_shape("labels", labels, ("batch >= 1", "...", "labels >= 1"))
        pairs = zip(labels.flatten(0, -2).unbind(-1), targets.flatten(0, -2).unbind(-1), strict=True)
        check_shape("targets", targets, tuple(labels.shape))
        check_any_target(targets != IGNORED)
        present = [(label, target) for label, target in pairs if bool((target != IGNORED).any())]
        matrices = [confusion_matrix(label, target, 2) for label, target in present]
        counts = torch.stack([torch.stack([m[1, 1], m[0, 1] + m[1, 0]]) for m in matrices]).double()
    else:
        matrix = confusion_matrix(labels, targets)
        hits = matrix.diagonal()
        counts = torch.stack([hits, matrix.sum(0) + matrix.sum(1) - 2 * hits], 1).double()
    if average == "micro":
        counts = counts.sum(0, keepdim=True)
    scores = 2.0 * counts[:, 0] / (2.0 * counts[:, 0] + counts[:, 1])
    return float(scores.nan_to_num(0.0).mean() if multilabel else scores.nanmean())
