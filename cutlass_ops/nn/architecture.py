"""Which matrices of a checkpoint are linear layers or word embeddings of its model, and why others
must stay plain tensors.

A model of transformers keeps some matrices as bare parameters (routers, stacked experts), reads the
``weight`` of some linear layers itself, and loads some tensors under other names or merged with
others. Where transformers is installed and knows the model, the model itself decides: it is built
on the meta device, without values, in evaluation mode. Otherwise names decide.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from .conv import CONVOLUTIONS
from .model_embeddings import reason_against_embedding
from .model_experts import PRODUCTS, ExpertsForm, experts_form
from .weight_reads import readers

#: Module names that are no linear layers of transformers' models, with the reason; used where the
#: model is not known.
_BY_NAME = (
    (
        r"(^|\.)experts\.",
        "an expert, whose weight transformers stacks with those of the other experts",
    ),
    (
        r"(^|\.)(gate|router|mlp\.router|shared_expert_gate)$",
        "a router, which transformers keeps as a bare parameter",
    ),
    (
        r"(^|\.)(dt_proj|x_proj|mixer\.out_proj)$",
        "a layer of a state-space model, which reads its weight itself",
    ),
)
#: Models whose linear layers store their weights transposed, ``[in, out]``: transformers' Conv1D.
_TRANSPOSED = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")
#: Names that transformers gives to output layers, besides those that ``get_output_embeddings``
#: returns.
_HEADS = frozenset(("lm_head", "embed_out", "classifier", "score", "qa_outputs"))
_MOST_LAYERS = 1000


@dataclass(frozen=True)
class ExpertTensor:
    """Which part of an experts module's weights a tensor of a checkpoint is.

    Attributes:
        module, parameter: of the model.
        expert: the number of the expert; None if the tensor stacks all of them.
        part: which of the matrices whose rows make up the expert's weight; None if the tensor is
            the whole weight.
    """

    module: str
    parameter: str
    expert: int | None = None
    part: int | None = None


class Conversions:
    """How transformers renames and converts the tensors of a model's checkpoint.

    Args:
        model: a model of transformers, on any device, "meta" included.
    """

    def __init__(self, model: Any) -> None:
        found = import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
        self._loading = import_module("transformers.core_model_loading")
        self._renamings = [c for c in found if isinstance(c, self._loading.WeightRenaming)]
        self._converters = [c for c in found if isinstance(c, self._loading.WeightConverter)]
        self._prefix = model.base_model_prefix

    def renamed(self, tensor: str, known: Mapping[str, bool]) -> tuple[str, str | None]:
        """The model's name of a tensor, by the names that the model has, and the pattern of a
        conversion of its values.
        """
        # As transformers' loader does it, its second try included.
        rename = self._loading.rename_source_key
        name, pattern = rename(tensor, self._renamings, self._converters, self._prefix, known)
        if name not in known and tensor in known:
            name, pattern = rename(tensor, [], [], self._prefix, known)
        return name, pattern

    def keep(self, tensor: str) -> bool:
        """Whether a tensor that a file has under the model's name is loaded there as it is."""
        return self.renamed(tensor, {tensor: True}) == (tensor, None)

    def stacked(self, tensor: str, pattern: str) -> tuple[int, int | None] | None:
        """The number of the expert whose matrix a conversion stacks, and the position among the
        matrices that it joins; None for other conversions.
        """
        converter = next(c for c in self._converters if pattern in c.source_patterns)
        operations = [
            (type(operation).__name__, getattr(operation, "dim", None))
            for operation in converter.operations
        ]
        joined = len(converter.source_patterns)
        expected = [("MergeModulelist", 0), ("Concatenate", 1)]
        number = re.search(pattern.replace("*.", r"(?P<expert>\d+)\."), tensor)
        if operations != expected[:joined] or number is None or "expert" not in number.groupdict():
            return None
        return int(number["expert"]), converter.source_patterns.index(
            pattern
        ) if joined > 1 else None


class Architecture:
    """The model that a checkpoint belongs to, as far as it is known.

    Args:
        model: a model of transformers, on any device, "meta" included; None if it is not known.
        model_type: of its configuration; used only where there is no model.
    """

    def __init__(self, model: Any = None, model_type: str = "") -> None:
        self.model = model
        self._model_type = model_type
        if model is not None:
            self._modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
            self._tensors = dict.fromkeys(model.state_dict(), True)
            self._heads = output_heads(model)
            self._readers = readers(
                model, lambda read, module: all(_may_be(*test, module) for test in read.tests)
            )
            self._conversions = Conversions(model)

    def place(self, module: str, convolutions: bool = False) -> tuple[str, str]:
        """The model's name of a checkpoint's module, and why its weight is not that of a linear
        layer or a word embedding there, or with ``convolutions`` of a convolution.

        Returns:
            Name and reason. The reason is "" for such a layer; the name is "" if the model is not
            known or has no place for the weight.
        """
        if self.model is None:
            return "", ""
        renamed, pattern = self._conversions.renamed(f"{module}.weight", self._tensors)
        if renamed not in self._tensors:
            return "", ""
        name, _, part = renamed.rpartition(".")
        owner = self._modules.get(name)
        kind = type(owner).__name__
        if pattern is not None:
            return name, f"transformers loads it as part of {renamed}"
        kinds: tuple[type[nn.Module], ...] = (nn.Embedding, *(CONVOLUTIONS if convolutions else ()))
        if (
            part != "weight"
            or owner is None
            or (features(owner) is None and not isinstance(owner, kinds))
        ):
            return name, f"it is a parameter of {kind}, which is no nn.Linear"
        if isinstance(owner, nn.Embedding) and (reason := reason_against_embedding(owner)):
            return name, reason
        if isinstance(owner, nn.Linear) and not _is_plain(cast(Hashable, type(owner))):
            return name, f"its class {kind} computes something else than nn.Linear does"
        # Renamings of ".weight" do not hold for the names that a packed weight's tensors have.
        if (
            self._conversions.renamed(f"{module}.codes", {f"{name}.codes": True})[0]
            != f"{name}.codes"
        ):
            return (
                name,
                f"transformers renames it to {renamed} by a rule that does not hold for "
                "packed tensors",
            )
        return name, ""

    @cached_property
    def experts(self) -> dict[str, ExpertsForm]:
        """The modules that :class:`cutlass_ops.nn.MixedExperts` takes the place of, by
        the model's names.
        """
        if self.model is None:
            return {}
        forms = {name: experts_form(module) for name, module in self._modules.items()}
        return {name: form for name, form in forms.items() if form is not None}

    def expert_tensor(self, tensor: str) -> ExpertTensor | None:
        """The part of a module of :attr:`experts` that a checkpoint's tensor is; None if it is
        none, or if transformers converts it in another way.
        """
        if not self.experts:
            return None
        renamed, pattern = self._conversions.renamed(tensor, self._tensors)
        module, _, parameter = renamed.rpartition(".")
        if module not in self.experts or renamed not in self._tensors:
            return None
        if pattern is None:
            return ExpertTensor(module, parameter)
        place = self._conversions.stacked(tensor, pattern)
        return None if place is None else ExpertTensor(module, parameter, *place)

    @cached_property
    def _expert_codes(self) -> dict[str, bool]:
        return {f"{name}.{product}.codes": True for name in self.experts for product in PRODUCTS}

    def place_experts(self, stored: str) -> tuple[str, str] | None:
        """The module of :attr:`experts` and the product that a file's packed experts belong to, or
        None.
        """
        if not self.experts:
            return None
        found, pattern = self._conversions.renamed(f"{stored}.codes", self._expert_codes)
        if found not in self._expert_codes or pattern is not None:
            return None
        module, _, product = found.removesuffix(".codes").rpartition(".")
        return module, product

    def is_transposed(self, module: str) -> bool:
        """Whether a checkpoint's module is a linear layer that stores its weight
        as ``[in, out]``.
        """
        name, reason = self.place(module)
        return bool(name) and not reason and _is_conv1d(self._modules[name])

    def is_head(self, module: str) -> bool:
        """Whether a checkpoint's module is an output head of its model, by :func:`output_heads`."""
        return self.place(module)[0] in self._heads if self.model is not None else False

    def reason_to_keep(self, module: str) -> str:
        """Why the weight of a checkpoint's module must stay a plain tensor; "" if
        it may be packed.
        """
        name, reason = self.place(module)
        if reason:
            return reason
        if not name:
            return self._reason_by_name(module)
        if name in self._readers:
            return f"{self._readers[name]} reads its weight itself"
        tied = getattr(self.model, "all_tied_weights_keys", {})
        if (
            f"{name}.weight" in {*tied.keys(), *tied.values()}
            and self._modules[name] is not self.model.get_output_embeddings()
        ):
            return "it shares its weight with another module"
        return ""

    def is_embedding(self, module: str) -> bool:
        """Whether a checkpoint's module is a word embedding of its model."""
        return self.model is not None and isinstance(
            self._modules.get(self.place(module)[0]), nn.Embedding
        )

    def reason_against_rows(self, module: str) -> str:
        """Why a checkpoint's module cannot share its rows with a packed head; "" if it can."""
        if not self.is_embedding(module):
            return "it is not known as a word embedding of its model"
        name, reason = self.place(module)
        return reason or (
            f"{self._readers[name]} reads its weight itself" if name in self._readers else ""
        )

    def misfits(self, tensors: Iterable[str]) -> tuple[list[str], list[str]]:
        """Names of a checkpoint's tensors that the model has no place for, and of the model's that
        the checkpoint lacks, as transformers' loader finds them.

        Nothing where the model is not known, or not of a class that its configuration names.
        """
        if self.model is None or type(self.model).__name__ not in (
            self.model.config.architectures or ()
        ):
            return [], []
        names = {tensor: self._conversions.renamed(tensor, self._tensors)[0] for tensor in tensors}
        unexpected = {name for name in names.values() if name not in self._tensors}
        missing = (
            self._tensors.keys()
            - set(names.values())
            - getattr(self.model, "all_tied_weights_keys", {}).keys()
        )
        found = SimpleNamespace(unexpected_keys=unexpected, missing_keys=missing)
        self.model._adjust_missing_and_unexpected_keys(found)
        return [tensor for tensor, name in names.items() if name in found.unexpected_keys], sorted(
            found.missing_keys
        )

    def _reason_by_name(self, module: str) -> str:
        for pattern, reason in _BY_NAME:
            if re.search(pattern, module):
                return f"its name is that of {reason}"
        if self._model_type in _TRANSPOSED and re.search(
            r"(^|\.)c_(attn|proj|fc)$|(^|\.)q_attn$", module
        ):
            return f"models of type {self._model_type} store it transposed"
        return ""


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """What a checkpoint's ``config.json`` says of its model; names alone decide where transformers
    does not know it.

    Raises:
        ValueError: a configuration of more layers than any model has.
    """
    kind = config.get("model_type")
    kind = kind if isinstance(kind, str) else ""
    check_layers(config)
    if not kind:
        return Architecture(None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            transformers = import_module("transformers")
            settings = {
                key: value
                for key, value in config.items()
                if key not in ("quantization_config", "model_type")
            }
            return Architecture(
                skeleton(transformers, transformers.AutoConfig.for_model(kind, **settings))
            )
        # Not installed, a model that it does not know, or values in the file that one of its
        # classes does not expect.
        except Exception:
            return Architecture(None, kind)


def check_layers(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a configuration with more layers than any model has."""
    for holder in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key, value in holder.items():
            if (
                str(key).endswith(("layers", "_layer"))
                and type(value) is int
                and value > _MOST_LAYERS
            ):
                raise ValueError(
                    f"the configuration has {key} {value}; at most {_MOST_LAYERS} are expected"
                )


def skeleton(transformers: ModuleType, config: Any) -> Any:
    """The model that a configuration of transformers describes, on the meta device.

    Raises:
        ValueError: a configuration that no model class belongs to.
    """
    named = [
        getattr(transformers, str(name), None)
        for name in getattr(config, "architectures", None) or ()
    ]
    classes = [
        cls
        for cls in named
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
    ]
    for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING):
        if type(config) in mapping:
            found = mapping[type(config)]
            classes += found if isinstance(found, tuple | list) else [found]
    if not classes:
        raise ValueError(f"transformers has no model class for {type(config).__name__}")
    with torch.device("meta"):
        return classes[0](config).eval()


def output_heads(model: Any) -> set[str]:
    """Names of the layers that make the results of a model of transformers, which suffer
    most from few bits.
    """
    head = model.get_output_embeddings()
    return {
        name
        for name, module in model.named_modules()
        if (features(module) is not None or isinstance(module, CONVOLUTIONS))
        and (module is head or not _HEADS.isdisjoint(name.split(".")))
    }


def features(module: nn.Module) -> tuple[int, int] | None:
    """N and K of a linear layer (nn.Linear or transformers' Conv1D); None for other modules."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    if _is_conv1d(module):
        conv: Any = module
        return conv.nf, conv.nx
    return None


def _is_conv1d(module: nn.Module) -> bool:
    cls = type(module)
    return (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D")


@cache
def _is_plain(cls: Any) -> bool:
    """Whether a subclass of nn.Linear multiplies as nn.Linear does: tried on a small matrix."""
    if cls.forward is nn.Linear.forward:
        return True
    layer: Any = cls.__new__(cls)
    nn.Module.__init__(layer)
    layer.in_features, layer.out_features = 5, 3
    # from_pretrained makes models in the context of the meta device
    random = torch.Generator().manual_seed(0)
    layer.weight = nn.Parameter(
        torch.randn(3, 5, generator=random, dtype=torch.float32, device="cpu")
    )
    layer.bias = nn.Parameter(torch.randn(3, generator=random, dtype=torch.float32, device="cpu"))
    x = torch.randn(2, 5, generator=random, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        try:
            y = layer(x)
        except Exception:  # it needs attributes that its constructor sets
            return False
        return isinstance(y, torch.Tensor) and torch.allclose(
            y, nn.functional.linear(x, layer.weight, layer.bias)
        )


def _may_be(test: CodeType, expected: bool, module: nn.Module) -> bool:
    """Whether a condition in a module's code may be ``expected``, by the module's attributes."""
    try:
        return (
            bool(eval(test, vars(sys.modules[type(module).__module__]), {"self": module}))
            == expected
        )
    except Exception:  # it has other variables of the method
        return True
