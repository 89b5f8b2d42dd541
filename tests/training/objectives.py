"""A network and a function ``loss(network, batch, clock)`` as the objective that :func:`flowbnn.training.train` takes."""

from torch import nn

from flowbnn.training import train as train_objective


class Objective(nn.Module):
    def __init__(self, network, loss):
        super().__init__()
        self.network, self.loss = network, loss

    def forward(self, batch, clock):
        return self.loss(self.network, batch, clock)


def train(network, loss, optimizer, *args, validate=None, **more):
    check = None if validate is None else lambda: validate(network)
    more = {"name_prefix": "network", "validate": check, **more}
    return train_objective(Objective(network, loss), optimizer, *args, **more)
