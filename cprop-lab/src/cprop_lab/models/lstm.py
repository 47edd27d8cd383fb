"""An LSTM layer that trains quickly on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

__all__ = ["LSTM"]


class LSTM(nn.LSTM):
    r"""One layer of torch's LSTM, its parameters and all; on a CPU it trains in the time of its matrix products.

    .. math::
        i, f, o = \sigma(W_{ifo} x_t + U_{ifo} h_{t-1} + b_{ifo}), \quad
        z = \tanh(W_z x_t + U_z h_{t-1} + b_z), \quad
        c_t = f c_{t-1} + i z, \quad h_t = o \tanh c_t

    Args:
        inputs: features of the input.
        outputs: features of the output.

    Example:
        >>> import torch
        >>> x, zeros = torch.randn(35, 4, 8), torch.zeros(1, 4, 16)
        >>> y, (hidden, cell) = LSTM(8, 16)(x, (zeros, zeros))
        >>> y.shape, hidden.shape, cell.shape
        (torch.Size([35, 4, 16]), torch.Size([1, 4, 16]), torch.Size([1, 4, 16]))
    """

    # torch leaves a CPU's LSTM to oneDNN, and oneDNN its backward pass to a reference implementation, in float32 and in
    # bfloat16 alike: `python -m benchmarks.lstm` has the times of both. Its forward pass is good, and evaluates;
    # under bfloat16 with cell states in bfloat16, which moved the loss only where they had run beyond a thousand.

    weight_ih_l0: Tensor
    weight_hh_l0: Tensor
    bias_ih_l0: Tensor
    bias_hh_l0: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # type: ignore[override]
        """Run over ``x[time, batch, feature]`` from a state on; gives the outputs, and the state after them."""
        if x.device.type != "cpu" or not torch.is_grad_enabled():
            y, after = super().forward(x, state)
            return y, after
        hidden, cell = (tensor.squeeze(0) for tensor in state)
        before_gates = F.linear(x, self.weight_ih_l0, self.bias_ih_l0 + self.bias_hh_l0)
        recurrent = self.weight_hh_l0.to(before_gates.dtype)
        y, cell = _Recurrence.apply(before_gates, recurrent, hidden, cell)  # type: ignore[no-untyped-call]
        return y, (y[-1:], cell.unsqueeze(0))


class _Recurrence(torch.autograd.Function):
    """The part of an LSTM that goes from time step to time step, and back.

    Gates and cells are kept in float32 at least. The weight's gradient is one product over all time steps, where
    autograd would make, and add up, one for each.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        time, batch, size = len(inputs), *hidden.shape
        exact = torch.promote_types(inputs.dtype, torch.float32)
        h = inputs.new_empty(time + 1, batch, size)
        c = inputs.new_empty(time + 1, batch, size, dtype=exact)
        gates = inputs.new_empty(time, batch, 4 * size, dtype=exact)
        h[0], c[0] = hidden, cell
        for t in range(time):
            gates[t] = torch.addmm(inputs[t], h[t], weight.t())
            i, f, z, o = gates[t].chunk(4, dim=1)
            for gate in (i, f, o):
                gate.sigmoid_()
            z.tanh_()
            torch.addcmul(i * z, f, c[t], out=c[t + 1])
            h[t + 1] = o * c[t + 1].tanh()
        ctx.save_for_backward(weight, h, c, gates)
        return h[1:], c[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dc: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        weight, h, c, gates = ctx.saved_tensors
        d_gates = gates.new_empty(gates.shape, dtype=h.dtype)
        dh = torch.zeros_like(c[0])
        for t in reversed(range(len(gates))):
            i, f, z, o = gates[t].chunk(4, dim=1)
            tanh_c = c[t + 1].tanh()
            dh = dh + dy[t]
            dc = dc + dh * o * (1 - tanh_c * tanh_c)
            di, df, dz, do = d_gates[t].chunk(4, dim=1)
            di.copy_(dc * z * i * (1 - i))
            df.copy_(dc * c[t] * f * (1 - f))
            dz.copy_(dc * i * (1 - z * z))
            do.copy_(dh * tanh_c * o * (1 - o))
            dc = dc * f
            dh = (d_gates[t] @ weight).to(dc.dtype)
        d_weight = d_gates.flatten(0, 1).t() @ h[:-1].flatten(0, 1)
        return d_gates, d_weight, dh, dc
