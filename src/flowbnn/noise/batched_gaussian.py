r"""The learnable Gaussians of many layers, end to end, and what their KL is made of.

Layer :math:`l` starts its noise at :math:`\mathcal N(\mu, \sigma^2)` with :math:`s = b \tanh(a / b)`, :math:`\sigma = e^s \sigma_0` and
:math:`\mu = c + t + e^s (\mu_0 - c)`: shift :math:`t`, raw log-scale :math:`a`, base :math:`\mathcal N(\mu_0, \sigma_0^2)`. On a
processor both functions here, which every training step calls, are single nodes with derivatives written by hand in numpy (an
operation on a short vector is started sooner by numpy than by torch); elsewhere they are torch's own operations.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flowbnn.numerics import soft_clamp

__all__ = ["Frame", "draw", "frame_of", "gather", "summarize"]

_NORMAL_ENTROPY = 0.5 * (1.0 + float(np.log(2.0 * np.pi)))  # of a standard normal, in nats


class Frame(NamedTuple):
    """What is fixed: the layers' places and the constants of base and prior, laid end to end.

    Args:
        sizes: length of each layer's vector.
        bound: of the log-scales.
        center, loc, scale: of the affine maps and the base.
        prior_loc, prior_scale: of the prior.
        counts: how many vectors the KL of each layer counts.
        segments: the layer of every number.
        fixed: log of prior scale over base scale, summed for each layer.
        entropy: entropy of each layer's base.
    """

    sizes: tuple[int, ...]
    bound: float
    center: Tensor
    loc: Tensor
    scale: Tensor
    prior_loc: Tensor
    prior_scale: Tensor
    counts: Tensor
    segments: Tensor
    fixed: Tensor
    entropy: Tensor


def frame_of(layers: list[Any]) -> Frame:
    """The frame of layers whose noise starts as a learnable Gaussian; made once as long as nothing of it changes."""
    bases, affines, priors = zip(*(noise.start for noise in layers), strict=True)
    tensors = [t for module in (*bases, *priors) for t in (module.loc, module.scale)]
    key = (
        tuple(noise.layout.dim for noise in layers),
        affines[0].bound,
        tuple(a.center for a in affines),
        tuple(noise.count for noise in layers),
    )
    if torch.compiler.is_compiling() or any(tensor.is_inference() for tensor in tensors):
        return _build(key, tensors)
    marks = tuple((id(t), t._version, t.data_ptr()) for t in tensors)
    return _cached(key, marks, _Held(tensors))


class _Held:
    """Tensors in the arguments of a cached function; the other arguments tell whether they are the same."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held)


@lru_cache(maxsize=64)
def _cached(key: Any, marks: Any, held: _Held) -> Frame:
    with (
        torch.inference_mode(False),
        torch.no_grad(),
    ):  # or a call under inference mode would spoil it for training
        return _build(key, [tensor.detach() for tensor in held.tensors])


def _build(key: Any, tensors: list[Tensor]) -> Frame:
    sizes, bound, centers, counts = key
    half = len(tensors) // 2
    loc, scale = torch.cat(tensors[0:half:2]), torch.cat(tensors[1:half:2])
    prior_loc, prior_scale = torch.cat(tensors[half::2]), torch.cat(tensors[half + 1 :: 2])
    device, dtype = loc.device, loc.dtype
    # made on the device, so that a compiled or recorded step has no copy from the host in it
    segments = torch.cat([torch.full((n,), i, device=device) for i, n in enumerate(sizes)])
    pairs = zip(sizes, centers, strict=True)
    center = torch.cat([torch.full((n,), c, dtype=dtype, device=device) for n, c in pairs])
    weights = torch.cat([torch.full((1,), float(c), dtype=dtype, device=device) for c in counts])
    zeros = loc.new_zeros(len(sizes))
    fixed = zeros.index_add(0, segments, prior_scale.log() - scale.log())
    entropy = zeros.index_add(0, segments, scale.log() + _NORMAL_ENTROPY)
    return Frame(sizes, bound, center, loc, scale, prior_loc, prior_scale, weights, segments, fixed, entropy)


def _by_hand(value: Tensor) -> bool:
    return (
        value.device.type == "cpu"
        and value.dtype in (torch.float32, torch.float64)
        and not torch.compiler.is_compiling()
        and torch._C._functorch.maybe_current_level() is None
    )


def gather(frame: Frame, shifts: list[Tensor], raws: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    r""":math:`\mu`, :math:`\sigma` and :math:`s` of all layers."""
    if _by_hand(shifts[0]):
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
        center, loc, scale = frame.center.numpy(), frame.loc.numpy(), frame.scale.numpy()
        shift, raw = np.concatenate(arrays[:half]), np.concatenate(arrays[half:])
        log_scale = frame.bound * np.tanh(raw / frame.bound)
        factor = np.exp(log_scale)
        shift += center
        shift += (loc - center) * factor
        ctx.frame, ctx.kept = frame, (log_scale, factor)
        ctx.save_for_backward(*parameters)
        return tuple(torch.from_numpy(part) for part in (shift, scale * factor, log_scale))

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
        center, loc, scale = frame.center.numpy(), frame.loc.numpy(), frame.scale.numpy()
        of_factor = of_mean.numpy() * (loc - center) + of_deviation.numpy() * scale
        of_raw = (of_factor * factor + of_log_scale.numpy()) * (1.0 - np.square(log_scale / frame.bound))
        return None, *of_mean.split(frame.sizes), *torch.from_numpy(of_raw).split(frame.sizes)


def draw(mean: Tensor, deviation: Tensor, normal: Tensor, first: int = 0) -> Tensor:
    r""":math:`\mu + \sigma \epsilon` for the numbers from ``first`` on; ``normal`` has the draws on its first axis."""
    if _by_hand(mean):
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
    if _by_hand(mean):
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
    both = torch.stack([0.5 * square - log_scale, log_scale])
    sums = both.new_zeros(2, len(frame.sizes)).index_add(1, frame.segments, both)
    kls, entropies = sums[0] + frame.fixed, sums[1] + frame.entropy
    if log_dets is not None:
        volume = F.pad(log_dets.mean(-1), (len(frame.sizes) - flows, 0))
        kls, entropies = kls - volume, entropies + volume
    return kls * frame.counts, entropies * frame.counts


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
        logs = np.add.reduceat(log_scale.detach().numpy(), starts)
        kls = 0.5 * np.add.reduceat(square, starts) - logs + frame.fixed.numpy()
        entropies = logs + frame.entropy.numpy()
        if log_dets is not None:
            volume = log_dets.detach().numpy().mean(-1)
            kls[len(sizes) - flows :] -= volume
            entropies[len(sizes) - flows :] += volume
        ctx.frame, ctx.flows, ctx.kept = frame, flows, (cut, error, spread, pull)
        ctx.save_for_backward(*tensors)
        counts = frame.counts.numpy()
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
        sizes, counts, width = frame.sizes, frame.counts.numpy(), frame.prior_scale.numpy()
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
        parts = (torch.from_numpy(part) for part in (of_mean, of_deviation, of_log_scale))
        return None, None, None, *parts, of_log_dets, *of_ends
