"""The No-U-Turn sampler (Hoffman and Gelman, 1111.4246): Hamiltonian Monte Carlo that finds the length of its trajectories itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.inference.chain_method import ChainMethod
from flowbnn.inference.chains import Kernel
from flowbnn.inference.hamiltonian import State, Transition
from flowbnn.inference.method import check_whole, register_method
from flowbnn.inference.nuts_kernel import nuts_kernel

__all__ = ["NUTS"]


@register_method
@dataclass(frozen=True, kw_only=True, repr=False)
class NUTS(ChainMethod):
    """The No-U-Turn sampler with multinomial weights; see :class:`ChainMethod`.

    Args:
        max_depth: doublings of a trajectory at most, which then has ``2 ** max_depth - 1`` steps.

    >>> import flowbnn as fb
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> method = fb.NUTS(samples=50, warmup=50, chains=2, epochs=0)
    >>> posterior = method.fit(torch.nn.Linear(1, 1), [(x, 2 * x)], likelihood=fb.Gaussian(noise=0.1), seed=0, progress=False)
    >>> posterior.diagnostics().divergences
    0
    """

    name: ClassVar[str] = "nuts"
    label: ClassVar[str] = "NUTS"

    max_depth: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("max_depth", self.max_depth)
        if self.max_depth > 15:
            raise FlowBNNError(
                f"max_depth is at most 15, which is 32,767 steps for one draw, not {self.max_depth}"
            )

    def kernel(self, potential: Any) -> Kernel:
        def transition(
            state: State, step_size: Tensor, inverse_mass: Tensor, sources: Sequence[torch.Generator]
        ) -> tuple[State, Transition]:
            return nuts_kernel(potential, state, step_size, inverse_mass, sources, self.max_depth)

        return transition

    def work(self) -> float:
        return 2.0 ** min(6, self.max_depth) - 1  # trajectories of networks have 2**5 to 2**7 steps

    def remembered(self) -> tuple[str, ...]:
        return (*super().remembered(), "max_depth")
