"""Random folds of a cross-validation, stratified by class."""

import torch
from torch import Tensor


def split_folds(targets: Tensor, folds: int, seed: int) -> list[Tensor]:
    """Returns the indices of the examples of each fold, as equal in size as possible.

    Every class is spread over the folds, so that a fold misses a class only if the class has fewer examples than there are folds.
    Examples with several labels, such as pixels, stay whole and are not stratified.

    Args:
        targets: Targets of all examples. Integers ``[N]`` are classes.
        folds: Number of folds. With fewer examples there are fewer folds.
        seed: Seed of the random order.

    >>> labels = torch.tensor([0] * 6 + [1] * 3)
    >>> [labels[fold].sort().values.tolist() for fold in split_folds(labels, 3, seed=0)]
    [[0, 0, 1], [0, 0, 1], [0, 0, 1]]
    """
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
    if not targets.is_floating_point() and targets.numel() == len(targets):
        order = order[targets.cpu().flatten()[order].argsort(stable=True)]
    folds = min(folds, len(order))
    return [order[fold::folds] for fold in range(folds)]
