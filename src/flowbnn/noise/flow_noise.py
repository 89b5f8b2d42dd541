"""Noise from a normalizing flow, as in Xiong's report "Normalizing Flows for Implicit Bayesian Neural Networks"."""

import itertools
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Literal

import torch
from torch import Tensor

from flowbnn.distributions import Base, Divergence, Flow, MixtureBase, NormalBase, NormalMixture, divergence
from flowbnn.distributions.draws import (
    draw_components,
    reparameterized_sample,
    select_normal,
    standard_normal,
)
from flowbnn.errors import FlowBNNError
from flowbnn.noise.base import Noise, Site
from flowbnn.noise.contexts import NoiseContext, OptionalGenerator, RowShard, Shape, context_of
from flowbnn.noise.layout import Layout
from flowbnn.numerics import sum_rightmost
from flowbnn.transforms import ActNorm, Affine, BatchNorm, BlockTriangular, Compose, PlanarLU, Transform


class InputNoise(Noise):
    r"""Noise whose posterior is a flow: a base pushed through a transform, with a prior on the result.

    .. math:: \mathrm{KL}[q(z) \| p(z)] = E_{q_0}\Big[\log q_0(z_0) - \sum_i \log|\det J_{g_i}| - \log p(z_k)\Big]

    Args:
        base: Base distribution :math:`q_0`.
        transform: Transform of the flow.
        prior: Prior :math:`p` of the *transformed* noise.
        layout: Position of the noise vector on the layer's tensor.
        site: ``"channel"`` for one vector per feature map, ``"position"`` for an independent one at every position.
        positions: Number of positions whose KL is counted at site ``"position"``. It is exact for the size of the feature map.
            ``"mean"`` counts one position, as Xiong's report does, which tempers the KL by the number of positions.
        kl_samples: Number of draws for a KL without closed form.
        label: Text in the table of the conversion.
    """

    uses_default_draw = True  # False for subclasses that override ``draw``, which are drawn one by one

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.uses_default_draw = cls.draw is InputNoise.draw

    def __init__(
        self,
        base: Base,
        transform: Transform,
        prior: Base,
        layout: Layout,
        site: Site = "channel",
        positions: int | Literal["mean"] = "mean",
        kl_samples: int = 16,
        label: str = "flow",
    ) -> None:
        super().__init__(layout, site)
        self.base, self.transform, self.prior = base, transform, prior
        self.positions, self.kl_samples, self.label = positions, kl_samples, label
        # number of vectors whose KL is counted
        self.count = 1 if site == "channel" or positions == "mean" else int(positions)
        self._find_structure()

    def set_prior(self, prior: Base) -> None:
        """Replaces the prior."""
        self.prior = prior
        self._find_structure()

    def _find_structure(self) -> None:
        """Finds the learnable Gaussian or mixture that the noise begins with, which are drawn for many layers at once."""
        steps = list(self.transform) if isinstance(self.transform, Compose) else [self.transform]
        normal = bool(steps) and isinstance(self.prior, NormalBase) and isinstance(steps[0], Affine)
        base = (self.base, steps[0], self.prior) if normal else None
        self.gaussian_base = base if isinstance(self.base, NormalBase) else None
        # not isinstance: a subclass may have another distribution
        self.mixture_base = base if type(self.base) is MixtureBase else None
        # the transforms after the base, or after the affine map that is merged with it
        merged = self.gaussian_base is not None or self.mixture_base is not None
        self.flow_tail: list[Transform] = steps[1:] if merged else [self.transform]
        self.flow_is_chain = len(self.flow_tail) == 1 and isinstance(self.flow_tail[0], PlanarLU)
        self.normalizing = tuple(m for m in self.transform.modules() if isinstance(m, ActNorm | BatchNorm))

    def posterior(self) -> Flow:
        """Returns the distribution of one noise vector."""
        return Flow(self.base.distribution(), self.transform)

    @torch.no_grad()
    def set_gaussian(self, mean: Tensor, roots: Sequence[Tensor], links: Sequence[Tensor] = ()) -> None:
        """Sets the learnable Gaussian. A flow is not changed.

        Args:
            mean: Mean ``[D]``.
            roots: Vector of standard deviations, or for joint noise the lower triangular roots of the covariances of the blocks, each
                given the block before.
            links: Matrices of a chain, from the deviation of a block to that of the next.

        Raises:
            FlowBNNError: If the standard deviation is too small for the precision of the parameters.
        """
        steps = list(self.transform) if isinstance(self.transform, Compose) else [self.transform]
        width = torch.cat([root if root.ndim == 1 else root.norm(dim=-1) for root in roots])
        dtype = next(self.transform.parameters()).dtype
        too_small = ~(width > torch.finfo(dtype).eps * mean.abs())
        if bool(too_small.any()):
            index = int(too_small.int().argmax())
            noise = f"mean {float(mean[index]):.3g} and standard deviation {float(width[index]):.1g}"
            text = f"noise of {noise} is too narrow for {dtype}; check the noise of the likelihood, or use float64"
            raise FlowBNNError(text, kind="precision")
        if isinstance(steps[-1], BlockTriangular):
            steps[-1].assign(mean, roots, links)
        elif self.gaussian_base is None and isinstance(steps[-1], Affine):  # after a flow
            steps[-1].set_loc_and_scale(mean, width)
        else:
            base, affine, _ = self.gaussian_base
            base.scale.copy_(width)
            affine.raw_log_scale.zero_()
            affine.shift.copy_(mean - base.loc)

    def draw(self, shape: Shape, generator: OptionalGenerator = None) -> Tensor:
        """Returns noise vectors ``shape + (dim,)``, at least in float32: flows are not accurate in bfloat16."""
        device, half = self._autocast()
        with nullcontext() if half is None else torch.autocast(device, enabled=False):
            return self.push(self._draw_base(shape, generator, half), False, half is not None)[0]

    def draw_rows(
        self, rows: int, positions: Shape, generator: OptionalGenerator, shard: RowShard | None
    ) -> Tensor:
        if shard is None or self.reads_batch:
            return super().draw_rows(rows, positions, generator, shard)
        device, half = self._autocast()
        with nullcontext() if half is None else torch.autocast(device, enabled=False):
            base_draws = self.draw_base_rows(rows, positions, generator, shard, half)
            return self.push(base_draws, False, half is not None)[0]

    def draw_each(self, positions: Shape, generators: Iterable[torch.Generator]) -> Tensor:
        if (
            self.reads_batch
            or not self.uses_default_draw
            or (self.gaussian_base is None and self.mixture_base is None)
        ):
            return super().draw_each(positions, generators)
        device, half = self._autocast()
        with nullcontext() if half is None else torch.autocast(device, enabled=False):
            # one draw of normals per generator, then everything else at once
            mean, deviation = self._merged_normals()
            shape, components, normal = torch.Size((*positions, self.layout.dim)), [], []
            for source in generators:
                if self.mixture_base is not None:
                    components.append(draw_components(len(mean), positions, mean.device, source))
                normal.append(standard_normal(shape, mean.dtype, mean.device, source))
            if self.mixture_base is None:
                base_draws = torch.addcmul(mean, torch.stack(normal), deviation)
            else:
                base_draws = select_normal(mean, deviation, torch.stack(components), torch.stack(normal))
            return self.push(base_draws, False, half is not None)[0]

    def draw_base_rows(
        self,
        rows: int,
        positions: Shape,
        generator: OptionalGenerator,
        shard: RowShard | None,
        half: torch.dtype | None = None,
    ) -> Tensor:
        """Returns the draws of the base for :meth:`draw_rows`: made for the global batch, of which this process keeps its rows."""
        if shard is None:
            return self._draw_base((rows, *positions), generator, half)
        return shard.draw_local(rows, lambda number: self._draw_base((number, *positions), generator, half))

    def _draw_base(
        self, shape: Shape, generator: OptionalGenerator, half: torch.dtype | None = None
    ) -> Tensor:
        """Returns draws of the base, after the affine map that follows a normal or a mixture of normals."""
        if self.gaussian_base is None and self.mixture_base is None:
            return reparameterized_sample(self.base.distribution(), shape, generator)
        mean, deviation = self._merged_normals()
        if self.mixture_base is not None:
            return NormalMixture(mean, deviation).rsample(shape, generator)
        normal = standard_normal(torch.Size((*shape, len(mean))), mean.dtype, mean.device, generator)
        if half is not None and not self.flow_tail and torch.compiler.is_compiling():
            # the product is rounded anyway, and the compiled step stores half as many bytes for the backward pass
            normal = normal.to(half).to(mean.dtype)
        return torch.addcmul(mean, normal, deviation)

    def _merged_normals(self) -> tuple[Tensor, Tensor]:
        """Returns mean and standard deviation of the learnable Gaussian or of all components, with base and affine map merged."""
        base, affine, _ = self.gaussian_base or self.mixture_base
        first = base if self.mixture_base is None else base.distribution()
        return affine.push_normal(first.loc, first.scale)[:2]

    def push(self, z: Tensor, log_det: bool = True, allow_tf32: bool = False) -> tuple[Tensor, Tensor | None]:
        """Transforms draws of the base by the flow.

        Args:
            z: Draws of the base, after the affine map.
            log_det: If True, the log-determinants are returned as well.
            allow_tf32: Precision of the products, as in :class:`flowbnn.kernels.Group`.
        """
        total: Tensor | None = None
        for step in self.flow_tail:
            z, value = step.push(z, log_det, allow_tf32) if isinstance(step, PlanarLU) else step(z)
            if log_det and value is not None:
                value = value if step.event_dim == 1 else sum_rightmost(value, 1 - step.event_dim)
                total = value if total is None else total + value
        return z, total if total is not None or not log_det else z.new_zeros(z.shape[:-1])

    def record_shape(self, context: NoiseContext, positions: Shape) -> None:
        """Writes the positions into the context, so that :func:`~flowbnn.noise.batched.draw_with_kl` can draw for the next pass."""
        shapes, forward = context.recorded_shapes, context.forward
        chain = self.gaussian_base is not None and self.flow_is_chain
        if shapes is None or not chain or not self.uses_default_draw:
            return
        half = self._autocast()[1] is not None
        if shapes.get(self.key, (positions, half))[1] != half and forward is not None:
            forward.draws.pop(self.key, None)  # prepared for another precision
        if not torch.compiler.is_compiling():
            shapes[self.key] = (positions, half)

    @property
    def reads_batch(self) -> bool:
        """True if a draw depends on the others of its batch: the flow normalizes by the batch in training."""
        return any(not getattr(layer, "is_initialized", False) for layer in self.normalizing)

    def _autocast(self) -> tuple[str, torch.dtype | None]:
        """Returns the type of the device and the precision of autocast, or None if it is disabled."""
        device = next(itertools.chain(self.base.buffers(), self.base.parameters())).device.type
        return device, torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def mean(self) -> Tensor:
        base = self.base.distribution()
        if self.transform.linearity != "none":
            return self.transform(base.mean)[0]
        generator = torch.Generator(base.mean.device).manual_seed(0)
        return self.posterior().rsample((4096,), generator).mean(0)

    def divergence(self, samples: int | None = None, generator: OptionalGenerator = None) -> Divergence:
        device = self.base.distribution().mean.device.type
        with torch.autocast(device, enabled=False):
            kl, entropy = divergence(
                self.posterior(),
                self.prior.distribution(),
                samples or self.kl_samples,
                generator or context_of(self).modes[self.key].generator,
            )
        return Divergence(kl * self.count, entropy * self.count)

    def extra_repr(self) -> str:
        return f"{self.label}, dim={self.layout.dim}, site={self.site}"
