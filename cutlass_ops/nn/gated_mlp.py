"""MLPs that compute ``down(activation(gate(x)) * up(x))``: how they are recognised, and the module
that computes both factors in one layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from .model_experts import GATES, qualified

#: Where a module keeps its hooks.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

#: Attributes of a :class:`GatedMLP` that the model's module lacks.
_OWN = ("_form", "_layer", "_types", "_kind")


@dataclass(frozen=True)
class GatedForm:
    """Such an MLP.

    Attributes:
        gate, up, function, down: names of its children; ``function`` is the activation.
        activation: its name in :func:`cutlass_ops.mixed_gemm`.
    """

    gate: str
    up: str
    function: str
    down: str
    activation: str


class GatedMLP(nn.Module):
    """An MLP whose gate and up are one layer. :func:`cutlass_ops.fuse_linears` changes the class of
    the model's own module to this one.

    If gate, up or the activation was replaced since (by an adapter of PEFT, for example) or has
    hooks, the children are called as in the model's class; gate and up then copy their columns of
    the shared product.
    """

    _form: GatedForm
    _layer: str
    _types: tuple[type, ...]
    _kind: type[nn.Module]

    def restore(self) -> None:
        """Become a module of the model's own class again, with the children as they are."""
        kind = self._kind
        for name in _OWN:
            del self.__dict__[name]
        self.__class__ = kind  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """``down(activation(gate(x)) * up(x))``."""
        form = self._form
        gate, up = getattr(self, form.gate), getattr(self, form.up)
        function, down = getattr(self, form.function), getattr(self, form.down)
        parts = (gate, up, function)
        y: Tensor
        if tuple(map(type, parts)) == self._types and not any(map(is_wrapped, parts)):
            y = down(getattr(self, self._layer)(x))
        else:
            y = down(function(gate(x)) * up(x))
        return y


def become_gated(module: nn.Module, form: GatedForm, layer: str) -> None:
    """Make a module of this form a :class:`GatedMLP`; its child ``layer`` computes the product
    ``activation(gate(x)) * up(x)``, and the other children are given.
    """
    children = [module.get_submodule(name) for name in (form.gate, form.up, form.function)]
    own = (form, layer, tuple(map(type, children)), type(module))
    module.__class__ = GatedMLP
    module.__dict__.update(zip(_OWN, own, strict=True))


def gated_form(module: nn.Module, gate: str, up: str) -> GatedForm | None:
    """The form of a module whose class is nothing but ``down(activation(gate(x)) * up(x))`` of its
    children, gate and up of these names; None for all others.

    torch.fx records what it computes, as it is now.
    """
    own = [kind for kind in type(module).__mro__ if kind not in nn.Module.__mro__]
    names = {name for kind in own for name in vars(kind) if not name.startswith("__")}
    if names != {"forward"} or is_wrapped(module):
        return None
    nodes = graph_of_calls(module)
    found = _expression(nodes[-1].args[0]) if nodes and len(nodes) == 7 else None
    match found:
        case (down, ((function, (a, "x")), "*", (b, "x"))) if (a, b) == (gate, up):
            pass
        case (down, ((b, "x"), "*", (function, (a, "x")))) if (a, b) == (gate, up):
            pass
        case _:
            return None
    parts = [module.get_submodule(name) for name in (gate, up, function)]
    activation = GATES.get(qualified(type(parts[2])))
    if activation is None or any(map(is_wrapped, parts)):
        return None
    return GatedForm(gate, up, function, down, activation)


def graph_of_calls(module: nn.Module) -> list[fx.Node] | None:
    """What a module's ``forward`` does with its children's results, as torch.fx records it; None
    where it does more with them than pass them on.
    """
    tracer = fx.Tracer()
    tracer.is_leaf_module = lambda *_: True  # type: ignore[method-assign]
    try:
        return list(tracer.trace(module).nodes)
    except Exception:  # of any kind, raised for such code
        return None


def _expression(node: Any) -> Any:
    """The expression of a graph's node: "x", (child, argument) or (factor, "*", factor); None for
    others.
    """
    if not isinstance(node, fx.Node) or node.kwargs:
        return None
    name = getattr(node.target, "__name__", node.target)
    parts = [_expression(part) for part in node.args]
    if node.op == "placeholder":
        return "x"
    if node.op == "call_module" and len(parts) == 1:
        return node.target, parts[0]
    if node.op in ("call_function", "call_method") and name == "mul" and len(parts) == 2:
        return parts[0], "*", parts[1]
    return None


def is_wrapped(module: nn.Module) -> bool:
    """Whether calling a module does more than the class's ``forward``."""
    return "forward" in vars(module) or any(getattr(module, name) for name in _HOOKS)
