"""Finds the training steps of a script that knows nothing of memfit, and has them planned.

Optimizers tell what is trained. The outermost module that is called in training mode and holds such a parameter is the
model, and the slot of a plan is put into it (`memfit.fitted.installation`), so its first call is planned as it is made.

Torch calls nobody when an optimizer is made or a module is called, so `Optimizer.__init__` and `nn.Module.__call__` are
replaced: the latter only until every optimizer has stepped, and never while a model runs, so that no tracer meets it.
`torch.compile` of a module would compile the module without its plan; it returns the module as it is.

Known limits: a model whose `forward` is called directly is told, and not planned. Models in one process share the
budget: each is planned with the parameters, gradients and optimizer state of the others beside it, not with their
activations. Of models that are trained in several threads at once, one may be found a step later than it is called.
"""

from __future__ import annotations

import atexit
import functools
import logging
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from memfit.capture.checkpoints import checkpoints_itself
from memfit.capture.distributed.ddp import unwrapped
from memfit.capture.dynamo.own_calls import in_own_call
from memfit.capture.optimizer.state import optimizer_cost
from memfit.capture.optimizer.unwrapped import unwrapped_optimizer
from memfit.capture.options import CaptureOptions
from memfit.capture.residents import storage_bytes
from memfit.capture.training_step import device_of
from memfit.compiler.carried_plan import KnownSizes
from memfit.compiler.driver import make_plan
from memfit.compiler.request import Request
from memfit.errors import MemfitError
from memfit.fitted.installation import fitted_call, install_unplanned
from memfit.fitted.plain_steps import predicted
from memfit.fitted.plan import Plan
from memfit.script.options import ScriptOptions
from memfit.tools.batch_advice import micro_batch_advice
from memfit.torch_compat.core import in_backward_pass

__all__ = ["Watch", "watch"]

log = logging.getLogger("memfit.run")

_SPOKEN_SECONDS = 2.0


@dataclass(slots=True)
class Watch:
    """What is known of a script.

    Attributes:
        options: what was asked for.
        optimizers: the optimizers that the script made.
        stepped: those of them that have stepped.
        models: the models that have the slot of a plan, and the name of each.
        inner: the modules in these models; a checkpoint calls them by themselves, in the backward pass.
        others: outermost modules that were called and are not trained, such as a teacher.
        direct: models whose `forward` the script calls directly.
        plain_call: `nn.Module.__call__` as it was.
        spoken: when progress was told last.
    """

    options: ScriptOptions
    optimizers: list[weakref.ref[Optimizer]] = field(default_factory=list)
    stepped: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)
    models: list[tuple[weakref.ref[nn.Module], str]] = field(default_factory=list)
    inner: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    others: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    direct: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    plain_call: Callable[..., Any] = nn.Module.__call__
    spoken: float = 0.0

    def made(self, optimizer: Optimizer) -> None:
        """Notes an optimizer, whose model may be called next."""
        if not in_own_call():  # memfit makes and steps copies of optimizers
            self.optimizers.append(weakref.ref(optimizer))
            self.look()

    def has_stepped(self, optimizer: Optimizer) -> None:
        """Notes a step; once every optimizer has stepped, every model is known."""
        if in_own_call():
            return
        self.stepped.add(optimizer)
        if self.knows_all():
            nn.Module.__call__ = self.plain_call  # type: ignore[method-assign]

    def knows_all(self) -> bool:
        """Whether every optimizer has stepped."""
        return all(known in self.stepped for known in self.known())

    def known(self) -> Iterator[Optimizer]:
        """The optimizers that still exist."""
        for reference in self.optimizers:
            optimizer = reference()
            if optimizer is not None:
                yield optimizer

    def look(self) -> None:
        """Looks at the calls of modules from now on."""
        seen = self

        @functools.wraps(self.plain_call)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return seen.called(module, args, kwargs)

        nn.Module.__call__ = call  # type: ignore[method-assign]

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Calls a module, after the slot of a plan was put into it if it is a model that trains."""
        if torch.compiler.is_compiling() or in_own_call():
            return self.plain_call(module, *args, **kwargs)
        trains = module.training and torch.is_grad_enabled() and self.optimizer_of(module) is not None
        if module in self.inner or in_backward_pass() or not trains:
            self.others |= () if trains or module in self.inner else {module}
            return self.plain_call(module, *args, **kwargs)
        looking, nn.Module.__call__ = nn.Module.__call__, self.plain_call  # type: ignore[method-assign]
        try:
            if all(model() is not unwrapped(module) for model, _ in self.models):
                around = _forward_around(module)
                if around is None:
                    self.found(module, args, kwargs)
                else:
                    self.called_directly(around)
            return self.plain_call(module, *args, **kwargs)
        finally:
            if not self.knows_all():
                nn.Module.__call__ = looking  # type: ignore[method-assign]

    def optimizer_of(self, module: nn.Module) -> Optimizer | None:
        """The optimizer that trains most bytes of a module; None if none does."""
        mine = {id(parameter) for parameter in module.parameters()}
        trained = [
            (sum(p.nbytes for group in one.param_groups for p in group["params"] if id(p) in mine), one)
            for one in self.known()
        ]
        nbytes, found = max(trained, key=lambda pair: pair[0], default=(0, None))
        return found if nbytes else None

    def found(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Puts the slot of a plan into a model."""
        optimizer, name = self.optimizer_of(module), type(unwrapped(module)).__name__
        request = Request(
            budget=self.options.budget,
            optimizer=None if optimizer is None else unwrapped_optimizer(optimizer),
            levers=self.options.levers,
            tiers=self.options.tiers,
            search_seconds=self.options.search_seconds,
            beside_bytes=self.beside_bytes(module, optimizer),
            label=name,
            plain=True,
            capture=CaptureOptions(checkpointing="replace"),
        )
        if self.options.dry_run:
            self.tell_only(unwrapped(module), args, kwargs, request)
        count = sum(p.numel() for p in module.parameters())
        log.warning("found %s (%.1f million parameters) within %s", name, count / 1e6, self.options.budget)
        if any(checkpoints_itself(one) for one in module.modules()):
            log.warning("%s checkpoints itself; where it is planned, its plan takes the place of its checkpoints", name)
        install_unplanned(module, request, self.planned, gives_up=True, advise=micro_batch_advice)
        self.models.append((weakref.ref(unwrapped(module)), name))
        self.inner |= {one for one in unwrapped(module).modules() if one is not unwrapped(module)}

    def called_directly(self, module: nn.Module) -> None:
        """Tells that a model runs as it is, since its `forward` is called without the module's own call."""
        log.warning(
            "the script calls %s.forward directly, which passes by the module's call, and the plan in it, so that its "
            "steps run as they are; call the module instead, model(x)",
            type(module).__name__,
        )
        self.direct.add(module)
        self.inner |= {*module.modules()}

    def beside_bytes(self, module: nn.Module, optimizer: Optimizer | None) -> int:
        """Bytes of what else the script trains or calls: parameters, gradients and the state of other optimizers."""
        device = device_of(unwrapped(module)).type
        mine = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        theirs = [p for one in self.known() for group in one.param_groups for p in group["params"] if id(p) not in mine]
        called = [t for other in self.others for t in (*other.parameters(), *other.buffers()) if id(t) not in mine]
        states = sum(optimizer_cost(one, device).state_bytes for one in self.known() if one is not optimizer)
        gradients = sum(p.nbytes for p in {id(p): p for p in theirs}.values() if p.requires_grad)
        return storage_bytes([*theirs, *called], device) + int(gradients) + states

    def planned(
        self, model: nn.Module, args: Any, kwargs: Any, request: Request, known: KnownSizes | None = None
    ) -> Plan:
        """Makes a plan, and says how far it is."""
        plan = Plan.of(make_plan(model, args, kwargs, request, progress=self.progress, keep_call=True, known=known))
        log.warning("%s: %s", request.label, plan.summary())
        return plan

    def progress(self, stage: str, done: int, total: int) -> None:
        """Tells the stage every two seconds."""
        if time.monotonic() - self.spoken >= _SPOKEN_SECONDS:
            self.spoken = time.monotonic()
            log.warning("%s: %d of %d", stage, done, total)

    def tell_only(self, model: nn.Module, args: Any, kwargs: Any, request: Request) -> None:
        """Tells how a model would be planned.

        Raises:
            SystemExit: always: the script ends here.
        """
        try:
            step = predicted(model, args, kwargs, request)
            plan = (
                step.as_plan() if step is not None else make_plan(model, args, kwargs, request, progress=self.progress)
            )
        except MemfitError as error:
            log.warning("%s: %s", request.label, error)
            raise SystemExit(1) from None
        log.warning("%s: %s", request.label, plan.summary())
        raise SystemExit(0)

    def summary(self) -> list[str]:
        """One sentence for each model: its newest plan."""
        lines = []
        for reference, name in self.models:
            model = reference()
            if model is None:
                continue
            call = fitted_call(model)
            plans = list(call.plans.values())
            if plans:
                worst = max(plans, key=lambda plan: plan.predicted.peak_bytes)
                lines.append(f"{name}: {worst.summary()}" + (f" {len(plans)} plans." if len(plans) > 1 else ""))
            elif call.fitting.known:
                largest = max(call.fitting.known.values(), key=lambda step: step.predicted_bytes)
                lines.append(f"{name}: {largest.as_plan().summary()}")
        return lines


def watch(options: ScriptOptions, *, in_child: bool = False) -> Watch:
    """Has the training steps of this process planned from now on.

    Args:
        options: what was asked for.
        in_child: whether the process is the child of another that has the same options, so that it may train nothing.
    """
    _speak()
    seen = Watch(options=options)
    made = Optimizer.__init__

    @functools.wraps(made)
    def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        made(optimizer, *args, **kwargs)
        seen.made(optimizer)

    Optimizer.__init__ = init  # type: ignore[method-assign, assignment]
    register_optimizer_step_post_hook(lambda optimizer, *_: seen.has_stepped(optimizer))
    compiled = torch.compile

    @functools.wraps(compiled)
    def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(model, nn.Module):
            log.warning("torch.compile of %s is left out: its plan takes its place", type(model).__name__)
            return model
        return compiled(model, *args, **kwargs)

    def compile_module(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        log.warning("%s.compile() is left out: its plan takes its place", type(module).__name__)

    torch.compile = compile
    nn.Module.compile = compile_module  # type: ignore[method-assign, assignment]
    atexit.register(_end, seen, in_child=in_child)
    return seen


def _end(seen: Watch, *, in_child: bool) -> None:
    lines = seen.summary()
    for line in lines:
        log.warning("%s", line)
    if not seen.models and not seen.direct and not in_child and not seen.options.dry_run:
        log.warning("no training step was seen, so nothing was planned")


def _forward_around(module: nn.Module) -> nn.Module | None:
    """The outermost training module around a module whose `forward` is on the stack; None if there is none."""
    found: nn.Module | None = None
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward":
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and owner.training and module in {*owner.modules()} - {owner}:
                found = owner
        frame = frame.f_back
    return found


def _speak() -> None:
    """Has what memfit tells written to stderr, where the script does not set up logging itself."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("memfit: %(message)s"))
    logger = logging.getLogger("memfit")
    if not logger.handlers:
        logger.addHandler(handler)
        logger.propagate = False
