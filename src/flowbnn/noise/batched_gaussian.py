r"""The learnable Gaussians of many layers, end to end: their draws and their KL in few launches.

Layer :math:`l` starts its noise at :math:`\mathcal N(\mu, \sigma^2)` with :math:`s = b \tanh(a / b)`, :math:`\sigma = e^s \sigma_0` and
:math:`\mu = c + t + e^s (\mu_0 - c)`: shift :math:`t`, raw log-scale :math:`a`, base :math:`\mathcal N(\mu_0, \sigma_0^2)`. On a CPU
the functions here, which every training step calls, are single nodes of autograd with derivatives written in numpy (which starts an
operation on a short vector sooner than torch does); elsewhere they are torch's own operations.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flowbnn import kernels
from flowbnn.distributions import Divergence
from flowbnn.distributions.draws import standard_normal
from flowbnn.kernels import Group
from flowbnn.noise.passes import Share
from flowbnn.numerics import soft_clamp

__all__ = ["Frame", "Gaussians", "draw", "frame_of", "gather", "summarize"]

_NORMAL_ENTROPY = 0.5 * (1.0 + float(np.log(2.0 * np.pi)))  # of a standard normal, in nats


class Gaussians:
    """Layers whose noise begins as a learnable Gaussian, end to end: those without a flow first, so that the flows lie together."""

    def __init__(self, layers: list[Any]) -> None:
        plain: list[int] = []
        flows: list[int] = []
        for place, noise in enumerate(layers):
            (flows if noise.rest else plain).append(place)
        self.order = plain + flows
        self.layers = [layers[place] for place in self.order]
        self.flows = self.layers[len(plain) :]
        self.fresh = self.flows[0].kl_samples if self.flows else 0
        self.frame = frame_of(self.layers)
        shifts, raws = [], []
        for noise in self.layers:
            shifts.append(noise.start[1].shift)
            raws.append(noise.start[1].raw_log_scale)
        self.mean, self.deviation, self.log_scale = gather(self.frame, shifts, raws)
        self.cut = sum(self.frame.sizes[: len(plain)])

    @staticmethod
    def alike(layers: list[Any], generators: list[torch.Generator | None]) -> bool:
        """Whether the layers can be laid end to end: one bound, one generator, one dtype and device."""
        bound, shift = layers[0].start[1].bound, layers[0].start[1].shift
        for noise, generator in zip(layers, generators, strict=True):
            affine = noise.start[1]
            same = affine.bound == bound and generator is generators[0]
            if not same or affine.shift.dtype != shift.dtype or affine.shift.device != shift.device:
                return False
        return True

    def sample(self, normal: Tensor, rows: int) -> tuple[list[Tensor], Tensor | None]:
        """Draws of all layers from normal numbers, ``[draws, numbers]``, and the log-dets of the flows after the first ``rows``.

        The flows go at once where the device has kernels for that, else one by one.
        """
        first, plain = len(self.mean) - normal.shape[1], len(self.layers) - len(self.flows)
        starts, log_det = draw(self.mean, self.deviation, normal, first), rows < len(normal)
        parts = list(starts.split(self.frame.sizes if first == 0 else self.frame.sizes[plain:], -1))
        if not self.flows:
            return parts, None
        draws, parts = parts[: -len(self.flows)], parts[-len(self.flows) :]
        chains = [noise.chain for noise in self.flows]
        together = [chain for chain in chains if chain is not None]
        if len(together) == len(chains) and kernels.available(starts):
            group = Group(together, starts[:, self.cut - first :], log_det)
            ends, log_dets = kernels.evaluate_many([group])[0]
            draws += ends.split(self.frame.sizes[plain:], -1)
            return draws, None if log_dets is None else log_dets[:, rows:]
        volumes: list[Any] = []
        for noise, chain, start in zip(self.flows, chains, parts, strict=True):
            end, volume = (
                noise.push(start, log_det) if chain is None else kernels.evaluate(chain, start, log_det)
            )
            draws.append(end)
            volumes.append(volume)
        return draws, torch.stack(volumes)[:, rows:] if log_det else None

    def draws(self, rows: int, generator: torch.Generator | None, share: Share | None) -> list[Tensor]:
        """Draws ``[rows, dim]`` of each layer."""
        return self.draws_from(share_normal(rows, 0, len(self.mean), self.mean, generator, share))

    def draws_from(self, normal: Tensor) -> list[Tensor]:
        """Draws of each layer from normal numbers ``[rows, numbers]`` of the layers in the order of :attr:`layers`."""
        return self.restored(self.sample(normal, len(normal))[0])

    def restored(self, values: list[Any]) -> list[Any]:
        """One value for each layer, in the order in which the layers were given."""
        if not self.flows or len(self.flows) == len(values):
            return values
        return [values[self.order.index(place)] for place in range(len(values))]

    def divergences(self, generator: torch.Generator | None) -> tuple[list[Divergence], Divergence]:
        """KL and entropy of each layer and of all."""
        if not self.flows:
            return self.summary(None, [], None)
        width = len(self.mean) - self.cut
        normal = standard_normal(
            torch.Size((self.fresh, width)), self.mean.dtype, self.mean.device, generator
        )
        ends, log_dets = self.sample(normal, 0)
        return self.summary(normal, ends, log_dets)

    def ahead(
        self, rows: int, generator: torch.Generator | None, share: Share | None
    ) -> tuple[list[Tensor], list[Divergence], Divergence]:
        """Draws for ``rows`` rows, and KL and entropy on fresh draws of the flows, in one go."""
        normal = share_normal(rows, self.fresh, len(self.mean), self.mean, generator, share)
        both, log_dets = self.sample(normal, rows)
        draws = [x[:rows] for x in both]
        if not self.flows:
            return self.restored(draws), *self.summary(None, [], None)
        ends = [x[rows:] for x in both[len(self.layers) - len(self.flows) :]]
        return self.restored(draws), *self.summary(normal[rows:, self.cut :], ends, log_dets)

    def summary(
        self, normal: Tensor | None, ends: list[Tensor], log_dets: Tensor | None
    ) -> tuple[list[Divergence], Divergence]:
        """Closed form for the Gaussians; for the flows the bracket of :func:`~flowbnn.distributions.divergence` on fresh draws."""
        kls, entropies = summarize(
            self.frame, len(self.flows), self.mean, self.deviation, self.log_scale, normal, log_dets, ends
        )
        each = [Divergence(*pair) for pair in zip(kls.unbind(), entropies.unbind(), strict=True)]
        return self.restored(each), Divergence(kls.sum(), entropies.sum())


def share_normal(
    rows: int,
    fresh: int,
    width: int,
    like: Tensor,
    generator: torch.Generator | None,
    share: Share | None,
) -> Tensor:
    """Normal numbers for ``rows`` rows and ``fresh`` more, in one draw, of which a process that has a share keeps its own rows."""
    whole = rows if share is None else share.whole(rows)
    drawn = standard_normal(torch.Size((whole + fresh, width)), like.dtype, like.device, generator)
    return drawn if share is None else torch.cat([share.take(drawn[:whole], rows), drawn[whole:]])


class Frame(NamedTuple):
    """What is fixed: the layers' places and the constants of base and prior, laid end to end.

    Args:
        sizes: length of each layer's vector.
        bound: of the log-scales.
        counts: how many vectors the KL of each layer counts.
        center, loc, scale: of the affine maps and the base.
        prior_loc, prior_scale: of the prior.
    """

    sizes: tuple[int, ...]
    bound: float
    counts: tuple[float, ...]
    center: Any
    loc: Tensor
    scale: Tensor
    prior_loc: Tensor
    prior_scale: Tensor


def frame_of(layers: list[Any]) -> Frame:
    """The frame of layers whose noise starts as a learnable Gaussian."""
    sizes, counts, affines = [], [], []
    constants: tuple[list[Tensor], ...] = ([], [], [], [])
    for noise in layers:
        base, affine, prior = noise.start
        sizes.append(noise.layout.dim)
        counts.append(float(noise.count))
        affines.append(affine)
        for tensors, tensor in zip(constants, (base.loc, base.scale, prior.loc, prior.scale), strict=True):
            tensors.append(tensor)
    return Frame(tuple(sizes), affines[0].bound, tuple(counts), centers(affines), *map(torch.cat, constants))


def centers(affines: Any) -> Any:
    """The centers of affine maps: one number, or a vector where they differ."""
    for affine in affines:
        if affine.center != affines[0].center:
            # made on the device, so that a compiled or recorded step has no copy from the host in it
            return torch.cat([torch.full_like(a.shift, a.center, requires_grad=False) for a in affines])
    return affines[0].center


def _on_cpu(value: Tensor) -> bool:
    return (
        value.device.type == "cpu"
        and value.dtype in (torch.float32, torch.float64)
        and not torch.compiler.is_compiling()
        and torch._C._functorch.maybe_current_level() is None
    )


def gather(frame: Frame, shifts: list[Tensor], raws: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    r""":math:`\mu`, :math:`\sigma` and :math:`s` of all layers."""
    if _on_cpu(shifts[0]):
        return _Gather.apply(frame, *shifts, *raws)
    return _gather(frame, torch.cat(shifts), torch.cat(raws))


def _gather(frame: Frame, shift: Tensor, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    log_scale = soft_clamp(raw, frame.bound)
    factor = log_scale.exp()
    mean = torch.addcmul(shift + frame.center, frame.loc - frame.center, factor)
    return mean, frame.scale * factor, log_scale


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, frame: Frame, *parameters: Tensor) -> Any:
        half = len(parameters) // 2
        arrays = [parameter.detach().numpy() for parameter in parameters]
        center, loc, scale = (
            np.asarray(frame.center, frame.loc.numpy().dtype),
            frame.loc.numpy(),
            frame.scale.numpy(),
        )
        shift, raw = np.concatenate(arrays[:half]), np.concatenate(arrays[half:])
        log_scale = frame.bound * np.tanh(raw / frame.bound)
        factor = np.exp(log_scale)
        shift += center
        shift += (loc - center) * factor
        ctx.frame, ctx.kept = frame, (log_scale, factor)
        ctx.save_for_backward(*parameters)
        return torch.from_numpy(shift), torch.from_numpy(scale * factor), torch.from_numpy(log_scale)

    @staticmethod
    def backward(ctx: Any, of_mean: Tensor, of_deviation: Tensor, of_log_scale: Tensor) -> Any:
        frame, parameters = ctx.frame, ctx.saved_tensors
        half = len(parameters) // 2
        if torch.is_grad_enabled():
            results = _gather(frame, torch.cat(parameters[:half]), torch.cat(parameters[half:]))
            given = (of_mean, of_deviation, of_log_scale)
            wanted = [p for p in parameters if p.requires_grad]
            found = iter(torch.autograd.grad(results, wanted, given, create_graph=True))
            return None, *(next(found) if p.requires_grad else None for p in parameters)
        log_scale, factor = ctx.kept
        center, loc, scale = (
            np.asarray(frame.center, frame.loc.numpy().dtype),
            frame.loc.numpy(),
            frame.scale.numpy(),
        )
        of_factor = of_mean.numpy() * (loc - center) + of_deviation.numpy() * scale
        of_raw = (of_factor * factor + of_log_scale.numpy()) * (1.0 - np.square(log_scale / frame.bound))
        return None, *of_mean.split(frame.sizes), *torch.from_numpy(of_raw).split(frame.sizes)


def draw(mean: Tensor, deviation: Tensor, normal: Tensor, first: int = 0) -> Tensor:
    r""":math:`\mu + \sigma \epsilon` for the numbers from ``first`` on; ``normal`` has the draws on its first axis."""
    if _on_cpu(mean):
        return _Draw.apply(first, normal, mean, deviation)
    return torch.addcmul(mean[first:], normal, deviation[first:])


class _Draw(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: int, normal: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
        ctx.first = first
        ctx.save_for_backward(normal)
        return torch.addcmul(mean[first:], normal, deviation[first:])

    @staticmethod
    def backward(ctx: Any, of_draws: Tensor) -> Any:
        (normal,), first = ctx.saved_tensors, ctx.first
        if torch.is_grad_enabled():  # linear in what it is given: torch's own gradient of this is right
            of_mean, of_deviation = of_draws.sum(0), (of_draws * normal).sum(0)
            return None, None, F.pad(of_mean, (first, 0)), F.pad(of_deviation, (first, 0))
        given, noise = of_draws.numpy(), normal.numpy()
        both = np.zeros((2, first + given.shape[1]), given.dtype)
        given.sum(0, out=both[0, first:])
        np.einsum("ij,ij->j", given, noise, out=both[1, first:])
        return None, None, *torch.from_numpy(both).unbind()


def summarize(
    frame: Frame,
    flows: int,
    mean: Tensor,
    deviation: Tensor,
    log_scale: Tensor,
    normal: Tensor | None,
    log_dets: Tensor | None,
    ends: list[Tensor],
) -> tuple[Tensor, Tensor]:
    r"""KL and entropy of every layer: closed form for Gaussians, the mean over draws for the last ``flows`` layers.

    .. math:: \mathrm{KL} = \sum_i \Big(\tfrac12 E\big[(x_i - m_i)^2 / w_i^2 - \epsilon_i^2\big] - s_i + \log\frac{w_i}{\sigma_0}\Big)
              - E[\log|\det|]

    Args:
        normal: the :math:`\epsilon` of the flows' draws, ``[draws, numbers]``.
        log_dets: ``[flows, draws]``.
        ends: the flows' draws :math:`x`, one tensor each.
    """
    if _on_cpu(mean):
        return _Summarize.apply(frame, flows, normal, mean, deviation, log_scale, log_dets, *ends)
    return _summarize(frame, flows, normal, mean, deviation, log_scale, log_dets, *ends)


def _summarize(
    frame: Frame,
    flows: int,
    normal: Tensor | None,
    mean: Tensor,
    deviation: Tensor,
    log_scale: Tensor,
    log_dets: Tensor | None,
    *ends: Tensor,
) -> tuple[Tensor, Tensor]:
    cut = mean.shape[0] - sum(frame.sizes[len(frame.sizes) - flows :])
    loc, width = frame.prior_loc, frame.prior_scale
    square = (deviation[:cut] / width[:cut]).square() + ((mean[:cut] - loc[:cut]) / width[:cut]).square() - 1
    if normal is not None:
        x = ends[0] if len(ends) == 1 else torch.cat(ends, -1)
        sampled = (((x - loc[cut:]) / width[cut:]).square() - normal.square()).mean(0)
        square = torch.cat([square, sampled]) if cut else sampled
    log_base = frame.scale.log()
    both = torch.stack(
        [0.5 * square - log_scale + width.log() - log_base, log_scale + log_base + _NORMAL_ENTROPY]
    )
    # made on the device, so that a compiled or recorded step has no copy from the host in it
    segments = torch.cat([torch.full((n,), i, device=mean.device) for i, n in enumerate(frame.sizes)])
    kls, entropies = both.new_zeros(2, len(frame.sizes)).index_add(1, segments, both).unbind()
    if log_dets is not None:
        volume = F.pad(log_dets.mean(-1), (len(frame.sizes) - flows, 0))
        kls, entropies = kls - volume, entropies + volume
    if any(count != 1.0 for count in frame.counts):
        counts = torch.cat([kls.new_full((1,), count) for count in frame.counts])
        kls, entropies = kls * counts, entropies * counts
    return kls, entropies


class _Summarize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, frame: Frame, flows: int, *tensors: Any) -> Any:
        normal, mean, deviation, log_scale, log_dets, *ends = tensors
        sizes = frame.sizes
        cut = len(mean) - sum(sizes[len(sizes) - flows :])
        loc, width = frame.prior_loc.numpy(), frame.prior_scale.numpy()
        square = np.empty(len(mean), loc.dtype)
        error = (mean.detach().numpy()[:cut] - loc[:cut]) / width[:cut]
        spread = deviation.detach().numpy()[:cut] / width[:cut]
        square[:cut] = spread * spread + error * error - 1.0
        pull = None
        if normal is not None:
            x = np.concatenate([end.detach().numpy() for end in ends], -1) if len(ends) > 1 else ends[0]
            pull = (np.asarray(x.detach() if isinstance(x, Tensor) else x) - loc[cut:]) / width[cut:]
            square[cut:] = (pull * pull - np.square(normal.numpy())).mean(0)
        starts = np.cumsum((0, *sizes[:-1]))
        log_base = np.log(frame.scale.numpy())
        logs = np.add.reduceat(log_scale.detach().numpy(), starts)
        kls = 0.5 * np.add.reduceat(square, starts) - logs + np.add.reduceat(np.log(width) - log_base, starts)
        entropies = logs + np.add.reduceat(log_base + log_base.dtype.type(_NORMAL_ENTROPY), starts)
        if log_dets is not None:
            volume = log_dets.detach().numpy().mean(-1)
            kls[len(sizes) - flows :] -= volume
            entropies[len(sizes) - flows :] += volume
        ctx.frame, ctx.flows, ctx.kept = frame, flows, (cut, error, spread, pull)
        ctx.save_for_backward(*tensors)
        counts = np.asarray(frame.counts, kls.dtype)
        return torch.from_numpy(kls * counts), torch.from_numpy(entropies * counts)

    @staticmethod
    def backward(ctx: Any, of_kls: Tensor, of_entropies: Tensor) -> Any:
        frame, flows, saved = ctx.frame, ctx.flows, ctx.saved_tensors
        if torch.is_grad_enabled():
            results = _summarize(frame, flows, *saved)
            wanted = [t for t in saved if t is not None and t.requires_grad]
            found = iter(torch.autograd.grad(results, wanted, (of_kls, of_entropies), create_graph=True))
            parts = (next(found) if t is not None and t.requires_grad else None for t in saved)
            return None, None, *parts
        cut, error, spread, pull = ctx.kept
        sizes, width = frame.sizes, frame.prior_scale.numpy()
        counts = np.asarray(frame.counts, width.dtype)
        each = of_kls.numpy() * counts
        change = of_entropies.numpy() * counts - each
        by_number = np.repeat(each, sizes)
        of_mean, of_deviation = np.zeros_like(by_number), np.zeros_like(by_number)
        share = by_number[:cut] / width[:cut]
        of_mean[:cut] = share * error
        of_deviation[:cut] = share * spread
        of_ends: list[Tensor] = []
        of_log_dets = None
        if pull is not None:
            of_x = pull * (by_number[cut:] / (len(pull) * width[cut:]))
            of_ends = list(torch.from_numpy(of_x).split(sizes[len(sizes) - flows :], -1))
            volume = change[len(sizes) - flows :, None] / len(pull)
            of_log_dets = torch.from_numpy(np.repeat(volume, len(pull), 1))
        of_log_scale = np.repeat(change, sizes)
        numbers = map(torch.from_numpy, (of_mean, of_deviation, of_log_scale))
        return None, None, None, *numbers, of_log_dets, *of_ends
