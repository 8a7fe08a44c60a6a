"""Optimizers of users' own, of which the package knows nothing."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer


class _Toy(Optimizer):
    settings: ClassVar[dict[str, Any]] = {"lr": 0.01}

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, {**self.settings, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update()
        return loss

    def update(self) -> None:
        raise NotImplementedError

    def used(self) -> Iterator[tuple[dict[str, Any], Any]]:
        """Parameters with a gradient, each with its group."""
        return ((group, p) for group in self.param_groups for p in group["params"] if p.grad is not None)

    def norm_over_all(self) -> Tensor:
        grads = [p.grad.norm() for _, p in self.used()]
        return torch.stack(grads).norm() if grads else torch.ones(())


class Lamb(_Toy):
    """Adam's update scaled by the ratio of two norms of the whole tensor (You et al. 2020, arXiv:1904.00962)."""

    settings: ClassVar = {"lr": 0.02, "weight_decay": 0.01, "betas": (0.9, 0.99)}

    def update(self) -> None:
        for group, p in self.used():
            first, second = group["betas"]
            state = self.state[p]
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["step"] += 1
            state["exp_avg"].lerp_(p.grad, 1 - first)
            state["exp_avg_sq"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
            update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-6) + group["weight_decay"] * p
            ratio = p.norm() / update.norm().clamp(min=1e-9)
            p.add_(update * ratio, alpha=-group["lr"])


class Shampoo(_Toy):
    """A root of a Gram matrix for each dimension (Gupta et al. 2018, arXiv:1802.09568): lists of tensors of other
    shapes than the parameter's, some of them made anew at each step, and not contiguous."""

    settings: ClassVar = {"lr": 0.05}

    def update(self) -> None:
        for group, p in self.used():
            state, update = self.state[p], p.grad
            if not state:
                state["grams"] = [torch.eye(n, dtype=p.dtype, device=p.device) for n in p.shape]
                state["roots"] = [None for _ in p.shape]
            for dim in range(p.dim()):
                matrix = update.transpose(0, dim).reshape(p.shape[dim], -1)
                state["grams"][dim].add_(matrix @ matrix.T)
                values, vectors = torch.linalg.eigh(state["grams"][dim].float())
                root = vectors * values.clamp(min=1e-6).pow(-0.5 / p.dim())
                state["roots"][dim] = (root @ vectors.T).T.to(p.dtype)
                shape = update.transpose(0, dim).shape
                update = (state["roots"][dim] @ matrix).reshape(shape).transpose(0, dim)
            p.add_(update, alpha=-group["lr"])


class SignDescent(_Toy):
    """Element-wise, which nobody says. Its state is wide, and has the name of one that ASGD keeps once per tensor."""

    def update(self) -> None:
        for group, p in self.used():
            momentum = self.state[p].setdefault("mu", torch.zeros_like(p, dtype=torch.float32))
            momentum.lerp_(p.grad.float(), 0.1)
            p.sub_(momentum.sign().to(p.dtype), alpha=group["lr"])


class Decaying(SignDescent):
    """Decays what has no gradient, too."""

    def update(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.9)
        super().update()


class MuonAndAdam(_Toy):
    """As users have it in one class: matrices orthogonalised in some groups, Adam in others, and a count of steps for
    a group and for all."""

    settings: ClassVar = {"lr": 0.02, "use_muon": False, "step": 0}

    def __init__(self, groups: Any, *, own_count: bool = True) -> None:
        self.steps, self.own_count = 0, own_count
        super().__init__(groups)

    def update(self) -> None:
        self.steps += self.own_count
        for group in self.param_groups:
            group["step"] += 1
        for group, p in self.used():
            state = self.state[p]
            if group["use_muon"]:
                momentum = state.setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                u, _, v = torch.linalg.svd(momentum.reshape(len(p), -1).float(), full_matrices=False)
                p.add_((u @ v).reshape(p.shape).to(p.dtype), alpha=-group["lr"] / max(1, self.steps))
            else:
                first = state.setdefault("first", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                second = state.setdefault("second", torch.zeros_like(p)).lerp_(p.grad.square(), 0.01)
                p.addcdiv_(first / (1 - 0.9 ** group["step"]), second.sqrt().add_(1e-6), value=-group["lr"])


class Flagged(_Toy):
    """Notes in the state of each parameter how it is to be stepped, when it is built; reads a mark on parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            for place, p in enumerate(group["params"]):
                self.state[p]["sign"] = place % 2 == 0

    def update(self) -> None:
        for group, p in self.used():
            change = p.grad.sign() if self.state[p]["sign"] else p.grad / p.grad.norm()
            p.sub_(change, alpha=group["lr"] * getattr(p, "scale", 1.0))


class NormOverAll(_Toy):
    """Couples tensors: all are scaled by one norm."""

    settings: ClassVar = {"lr": 0.1}

    def update(self) -> None:
        norm = self.norm_over_all()
        for group, p in self.used():
            p.sub_(p.grad / norm, alpha=group["lr"])


class Langevin(_Toy):
    """Draws random numbers, one tensor after the other."""

    def update(self) -> None:
        for _, p in self.used():
            p.sub_(p.grad + torch.randn_like(p), alpha=0.01)


class Coin(SignDescent):
    """Draws one number a step, whatever there is to step."""

    def update(self) -> None:
        if torch.rand(()) < 0.5:
            super().update()


class WantsTensors(SignDescent):
    """Fails where a group lists nothing."""

    def update(self) -> None:
        assert all(group["params"] for group in self.param_groups), "an empty group"
        super().update()


class CountsUsed(_Toy):
    """Counts steps in the groups that list tensors, and in all."""

    settings: ClassVar = {"lr": 0.01, "step": 0}
    steps = 0

    def update(self) -> None:
        for group in self.param_groups:
            group["step"] += bool(group["params"])
        self.steps += any(group["params"] for group in self.param_groups)
        for group, p in self.used():
            p.sub_(p.grad.sign(), alpha=group["lr"] / (self.steps + group["step"]))


class RareClip(_Toy):
    """Couples tensors by a norm over all that few gradients are large enough for."""

    def update(self) -> None:
        factor = min(1.0, 1000 / float(self.norm_over_all().clamp(min=1e-9)))
        for group, p in self.used():
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            p.sub_(momentum.mul_(0.9).add_(p.grad, alpha=factor), alpha=group["lr"])


class CountingObjects(SignDescent):
    """Counts the steps in an object of its own."""

    def __init__(self, params: Any) -> None:
        self.counter = SimpleNamespace(count=0)
        super().__init__(params)

    def update(self) -> None:
        self.counter.count += 1
        if self.counter.count <= 100:
            super().update()


class Shared(SignDescent):
    """Shares the rate among the tensors of a group."""

    def update(self) -> None:
        for group, p in self.used():
            p.sub_(p.grad, alpha=group["lr"] / len(group["params"]))


class Counting(_Toy):
    """Counts steps in a collection, and holds functions."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.counts = {"steps": 0}
        self.rate, self.direction = (lambda count: 1 / count), self._direction

    def _direction(self, grad: Tensor) -> Tensor:
        return grad / grad.norm()

    def update(self) -> None:
        self.counts["steps"] += 1
        for group, p in self.used():
            p.sub_(self.direction(p.grad), alpha=group["lr"] * self.rate(self.counts["steps"]))


class Slow(Optimizer):
    """Wraps another optimizer, whose groups and state are its own, and follows it slowly. As the wrappers of several
    packages it does not call the constructor of Optimizer, which sets hooks."""

    def __init__(self, params: Any) -> None:
        self.fast = SignDescent(params)
        self.param_groups, self.state, self.defaults = self.fast.param_groups, self.fast.state, self.fast.defaults
        for group in self.param_groups:
            group["count"] = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.fast.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.fast.step(closure)
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    slow = self.state[p].setdefault("slow", p.clone())
                    if group["count"] % 2 == 0:
                        p.copy_(slow.lerp_(p, 0.5))
        return loss


class Shrinking(torch.optim.AdamW):
    """Writes to parameters behind the step of torch."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for p in (p for group in self.param_groups for p in group["params"]):
                p.mul_(0.9)
        return loss


class Signed(torch.optim.AdamW):
    """Reads gradients otherwise than torch's step does."""

    def _init_group(self, group: Any, params: Any, grads: Any, *rest: Any) -> Any:
        found = super()._init_group(group, params, grads, *rest)
        grads[:] = [grad.sign() for grad in grads]
        return found


class WarmsUp(torch.optim.AdamW):
    """Does something of its own around the step of torch."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.01 * min(1.0, self.steps / 3)
        return super().step(closure)


class NormOverLarge(_Toy):
    """Couples tensors by a norm over those that are matrices with sides of more than 64."""

    def update(self) -> None:
        large = {id(p) for _, p in self.used() if p.dim() == 2 and min(p.shape) > 64}
        norms = [p.grad.norm() for _, p in self.used() if id(p) in large]
        for _, p in self.used():
            p.sub_(p.grad / torch.stack(norms).norm() if id(p) in large else p.grad, alpha=0.1)


def adafactor(params: Any) -> Optimizer:
    return torch.optim.Adafactor(params, lr=0.05)


def muon_and_adam(params: Any) -> Optimizer:
    params = list(params)
    matrices = [p for p in params if p.dim() == 2 and p.numel()]
    rest = [p for p in params if p.dim() != 2 or not p.numel()]
    return MuonAndAdam([{"params": matrices, "use_muon": True}, {"params": rest, "lr": 0.003}])


class Lookahead(Optimizer):
    """Wraps an optimizer, has more state, and a state dict of its own (Zhang et al. 2019, arXiv:1907.08610). As in
    libraries, without ``Optimizer.__init__``."""

    def __init__(self, inner: Optimizer, every: int = 2) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self.inner, self.every, self.state = inner, every, defaultdict(dict)
        self.param_groups, self.defaults = inner.param_groups, inner.defaults
        for group in self.param_groups:
            group["count"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"] if group["count"] % self.every == 0 else ():
                p.copy_(self.state[p].setdefault("slow", p.detach().clone()).lerp_(p, 0.5))
        return loss

    def state_dict(self) -> dict[str, Any]:
        slow = [[self.state[p].get("slow") for p in params] for params in self._params()]
        return {"inner": self.inner.state_dict(), "slow": slow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.param_groups = self.inner.param_groups
        for params, values in zip(self._params(), state["slow"], strict=True):
            for p, value in zip(params, values, strict=True):
                if value is not None:
                    self.state[p]["slow"] = value.to(p.dtype, copy=True)

    def _params(self) -> list[list[Any]]:
        return [group["params"] for group in self.param_groups]


def lookahead(params: Any) -> Optimizer:
    return Lookahead(Lamb(params), every=1)


class Marked(torch.optim.AdamW):
    """Steps slices, and has more in its state dict than torch's."""

    mark = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "mark": 7}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mark = state["mark"]
        super().load_state_dict({name: value for name, value in state.items() if name != "mark"})
