"""The statistics that a measure reads, and the scalars that correct them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cprop.arithmetic import TINY, Number, addcmul, at_least
from cprop.sharding import local

__all__ = ["Corrections", "Moments"]


class Corrections(NamedTuple):
    r"""The scalars that turn running averages into statistics, computed once per step for all elements.

    Args:
        n: effective number of gradients in the averages, :math:`n_t = (1-\beta^t)/(1-\beta)`.
        eps: the :math:`\epsilon` of Algorithm 1.
        b: bias correction of the mean, :math:`1 - \beta^t`.
        b_v: bias correction of the mean square.
        k_m: :math:`1 / (n_t - 1 + \epsilon)`; zero if :math:`n_t = 1`, since one gradient has no variance.
        k_v: :math:`k_m b^2 / b_v`.
        k_eps: :math:`b\,\epsilon`, never zero.
    """

    n: Number
    eps: Number
    b: Number
    b_v: Number
    k_m: Number
    k_v: Number
    k_eps: Number

    @classmethod
    def of(cls, n: Number, eps: Number, b: Number = 1.0, b_v: Number = 1.0) -> Corrections:
        """Compute all scalars from the four independent ones."""
        # n - 1 is zero at t = 1 and at least beta afterwards. At t = 1 Algorithm 1 divides a variance of zero by
        # epsilon. Stored averages are rounded, so their variance may not be zero, and 1 / epsilon would amplify it.
        k_m = 1 / at_least(n - 1 + eps, 1e-8)
        k_m = torch.where(n > 1, k_m, 0.0) if isinstance(n, Tensor) else k_m if n > 1 else 0.0
        return cls(n, eps, b, b_v, k_m, k_m * b * b / b_v, at_least(eps * b, TINY))


@dataclass(frozen=True)  # torch.compile of torch 2.6 cannot read a property of a named tuple
class Moments:
    r"""Statistics of each element's past gradients: the only input of a measure.

    The averages are stored uncorrected, together with their bias corrections, so that a measure
    computes only what it reads. Use :meth:`of` to build one from bias-corrected averages.

    Args:
        m: running mean of the gradient.
        v: running mean of the squared gradient.
        k: the scalars of this step.
        a: running mean of the absolute gradient; ``None`` unless the measure needs it.
    """

    m: Tensor
    v: Tensor
    k: Corrections
    a: Tensor | None = None

    @classmethod
    def of(cls, m_hat: Tensor, v_hat: Tensor, n: Number, eps: Number, a_hat: Tensor | None = None) -> Moments:
        """Build from bias-corrected averages."""
        return cls(m_hat, v_hat, Corrections.of(n, eps), a_hat)

    def local(self) -> Moments:
        """The statistics of this rank's elements."""
        return Moments(local(self.m), local(self.v), self.k, None if self.a is None else local(self.a))

    @property
    def m_hat(self) -> Tensor:
        r"""Bias-corrected mean, :math:`\hat m_t`."""
        return self.m / self.k.b

    @property
    def v_hat(self) -> Tensor:
        r"""Bias-corrected mean square, :math:`\hat v_t`."""
        return self.v / self.k.b_v

    @property
    def a_hat(self) -> Tensor:
        r"""Bias-corrected mean absolute value, :math:`\hat a_t`."""
        if self.a is None:
            raise ValueError(
                "this measure needs the running mean of |g|: pass it as a_hat=..., or choose a measure that does "
                "not need it, such as 'normal'"
            )
        return self.a / self.k.b

    @property
    def z(self) -> Tensor:
        r"""Distance of the mean from zero in standard errors, :math:`|\hat m_t| / \sigma_t` (Algorithm 1).

        .. math::
            \sigma_t = \sqrt{\max(\hat v_t - \hat m_t^2, 0) / (n_t - 1 + \epsilon)} + \epsilon

        Both sides of the quotient are multiplied by the bias correction :math:`b` of the mean, which
        avoids dividing every element by a scalar:

        .. math::
            z_t = \frac{|m_t|}{\sqrt{\max(k_v v_t - k_m m_t^2, 0)} + b\,\epsilon}, \qquad
            k_m = \frac{1}{n_t - 1 + \epsilon}, \quad k_v = k_m b^2 / b_v

        At :math:`t = 1` both are zero: one gradient has no variance, so the first step is not scaled.
        The difference is accurate to about ``8 * finfo.eps * v``. If all gradients are equal, the exact standard error
        is zero, but rounding noise would make it positive; :math:`k_v` is therefore reduced by that relative amount.
        Otherwise this changes the scale by less than 1e-6. Zero divided by zero is zero: an element that has
        never seen a gradient has no known sign.

        Example:
            >>> Moments.of(torch.tensor(2.0), torch.tensor(8.0), n=5.0, eps=0.0).z
            tensor(2.0000)
        """
        rounding = 8 * torch.finfo(self.m.dtype).eps
        variance = torch.relu(addcmul(self.v * (self.k.k_v * (1 - rounding)), self.m, self.m, -self.k.k_m))
        return torch.abs(self.m) / (torch.sqrt(variance) + self.k.k_eps)
