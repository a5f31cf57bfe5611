"""Element-wise functions of torch, reductions, and changes of dtype."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.fuzz.block import ANY, SEQUENCE, VECTOR, Apply, Shape, block

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: getattr(torch, name) for name in ("sin", "cos", "atan", "erf", "square", "abs", "frac", "sinc", "asinh")},
    "expm1": lambda x: torch.expm1(x.clamp(-2, 2)),
    "exp2": lambda x: torch.exp2(x.clamp(-2, 2)),
    "i0": lambda x: torch.i0(x.clamp(-2, 2)),
    "exp": lambda x: torch.exp(x.clamp(-2, 2)),
    "sqrt": lambda x: torch.sqrt(x.abs() + 0.1),
    "rsqrt": lambda x: torch.rsqrt(x.square() + 0.5),
    "log1p": lambda x: torch.log1p(x.abs()),
    "reciprocal": lambda x: 1 / (x.abs() + 0.5),
    "sign": lambda x: x * torch.sign(x).detach(),
    "pow": lambda x: (x.abs() + 0.1) ** 1.7 + x**3 * 0.1,
    "pow of scalar": lambda x: torch.pow(1.3, x.clamp(-2, 2)),
    "clamp": lambda x: torch.clamp(x, -0.5, 1),
    "clamp by tensors": lambda x: torch.clamp(x, min=x.detach().mean(), max=x.mean() + 1),
    "lerp": lambda x: torch.lerp(x, x * 2, torch.sigmoid(x)),
    "addcmul": lambda x: torch.addcdiv(torch.addcmul(x, x, x, value=0.1), x, x.abs() + 1),
    "hypot": lambda x: torch.hypot(x, x + 1),
    "maximum": lambda x: torch.maximum(x, x.flip(0)) + torch.minimum(x, x.mean()),
    "nan_to_num": lambda x: torch.nan_to_num(x, nan=0.0),
    "xlogy": lambda x: torch.xlogy(x, x.abs() + 1),
    "logit": lambda x: torch.logit(torch.sigmoid(x), eps=1e-2),
    "fmod": lambda x: torch.fmod(x, 0.7) + torch.remainder(x, 0.9),
    "floor divide": lambda x: x + torch.div(x.detach(), 0.3, rounding_mode="floor"),
    "round": lambda x: x + (x.round() - x).detach(),
    "trunc": lambda x: x - torch.trunc(x).detach(),
    "atan2": lambda x: torch.atan2(x, x.square() + 1),
    "logaddexp": lambda x: torch.logaddexp(x, -x),
    "copysign": lambda x: torch.copysign(x, x.cos()),
    "ldexp": lambda x: torch.ldexp(x, torch.tensor(1)),
    "digamma": lambda x: torch.digamma(x.abs() + 1),
    "lgamma": lambda x: torch.lgamma(x.abs() + 1),
    "erfinv": lambda x: torch.erfinv(torch.tanh(x) * 0.9),
    "heaviside": lambda x: x * torch.heaviside(x.detach(), x.new_tensor(0.5)),
    "scale gradient": lambda x: x * 0.1 + (x * 0.9).detach(),
    "float and back": lambda x: x.to(torch.float64).sin().to(x.dtype),
    "bool and back": lambda x: x * (x > 0).int().to(x.dtype),
}
REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nansum": lambda x: x / (1 + torch.nansum(x.square(), -1, keepdim=True)),
    "aminmax": lambda x: x - torch.amin(x, -1, keepdim=True) + torch.aminmax(x, dim=-1, keepdim=True).max,
    "prod": lambda x: x + torch.prod(x.clamp(0.5, 1.1), -1, keepdim=True),
    "norms": lambda x: x / (x.norm(dim=-1, keepdim=True) + x.norm(p=1, dim=1, keepdim=True) + 1),
    "any": lambda x: x * (x > 1).any(-1, keepdim=True).to(x.dtype) + x * 0.5,
    "mean of all": lambda x: x - x.mean(),
    "std of all": lambda x: x * x.std(),
    "max of all": lambda x: x / (x.abs().max() + 1),
    "argmax": lambda x: x + x.argmax(-1, keepdim=True).to(x.dtype) * 0.1,
    "count": lambda x: x * torch.count_nonzero(x > 0).to(x.dtype) / x.numel(),
}


@block(*ANY)
def pointwise(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(sorted(FUNCTIONS))
    return Apply(lambda self, x: FUNCTIONS[kind](x), kind)


@block(*ANY)
def reduced(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(sorted(REDUCTIONS))
    return Apply(lambda self, x: REDUCTIONS[kind](x), kind)


@block(*ANY)
def residual(rng: random.Random, shape: Shape) -> nn.Module | None:
    inner = nn.Sequential(nn.Tanh(), rng.choice([nn.Sigmoid(), nn.GELU(), nn.SiLU()]))
    return Apply(lambda self, x: x + self.inner(x) * self.scale, inner=inner, scale=nn.Parameter(torch.tensor(0.5)))


@block(VECTOR, SEQUENCE)
def in_lower_precision(rng: random.Random, shape: Shape) -> nn.Module | None:
    """A part of the model in bfloat16: by autocast, or by its own dtype."""
    kind = rng.choice(["autocast", "autocast off", "cast"])
    one, two = nn.Linear(shape[-1], 24), nn.Linear(24, shape[-1])

    class Low(nn.Linear):
        """Stays in bfloat16 whatever the rest of the model is cast to."""

        def _apply(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
            return super()._apply(lambda t: function(t).to(torch.bfloat16), recurse)

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        if kind == "cast":
            return self.low(x.to(torch.bfloat16)).to(x.dtype)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=kind == "autocast"):
            made = self.two(torch.nn.functional.gelu(self.one(x.to(self.one.weight.dtype))))
        return x + made.to(x.dtype)

    return Apply(function, kind, one=one, two=two, low=Low(shape[-1], shape[-1]).to(torch.bfloat16))
