"""Algorithm 1 of the paper in float64, line by line: the reference for every implementation.

Written only from the paper. It shares no code with the library; the JAX version uses it too.
"""

import numpy as np
from scipy import special, stats


def standard_normal_cdf(x):
    return 0.5 * (1 + special.erf(x / np.sqrt(2)))


class Oracle:
    """The statistics of one parameter tensor, updated with one gradient at a time."""

    def __init__(self, beta=0.999, c=1.0, eps=0.0):
        eps = max(eps, 1e-300)  # zero, but zero divided by it is zero
        self.beta, self.c, self.eps = beta, c, eps
        self.m, self.v, self.a, self.n = 0.0, 0.0, 0.0, 0.0

    def observe(self, g):
        g = np.asarray(g, dtype=np.float64)
        self.m = self.beta * self.m + (1 - self.beta) * g
        self.v = self.beta * self.v + (1 - self.beta) * g**2
        self.a = self.beta * self.a + (1 - self.beta) * np.abs(g)
        # n_t = (1 - beta^t) / (1 - beta) by its recurrence, and the bias correction from it: the closed
        # forms would lose digits to cancellation.
        self.n = 1 + self.beta * self.n
        correction = (1 - self.beta) * self.n
        self.m_hat, self.v_hat, self.a_hat = self.m / correction, self.v / correction, self.a / correction
        variance = self.v_hat - self.m_hat**2
        # In exact arithmetic one gradient has no variance; in float64 about 1e-16 remains.
        variance = np.where(variance < 1e-15 * self.v_hat, 0.0, variance)
        self.sigma = np.sqrt(np.maximum(variance, 0) / (self.n - 1 + self.eps)) + self.eps
        return self

    @property
    def z(self):
        return np.abs(self.m_hat) / self.sigma

    def scale(self, measure="normal"):
        s = {
            "normal": lambda: 2 * np.abs(standard_normal_cdf(-self.z) - 0.5),
            "student_t": lambda: 2 * stats.t.cdf(self.z, max(self.n - 1, 1)) - 1,
            "moment_rate": lambda: np.abs(self.m_hat) / (np.sqrt(self.v_hat) + self.eps),
            "relative_rate": lambda: np.abs(self.m_hat) / (self.a_hat + self.eps),
        }[measure]()
        return np.minimum(self.c * s, 1)
