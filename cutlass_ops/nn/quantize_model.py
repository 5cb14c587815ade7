"""A float model to a quantised one, in place and layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from warnings import warn

from torch import Tensor, nn

from ..ops import arguments, native
from ..ops.expert_packing import WeightsOnDemand, reorder_experts
from ..ops.quantize import FLOAT_TYPES, check_options, quantize
from ..weights import formats
from ..weights.packed_experts import PackedExperts
from ..weights.reorder import reorder
from ..weights.weight import QuantizedWeight
from .architecture import output_heads
from .conv import CONVOLUTIONS, MixedConv, mixed_conv, padding_of
from .embedding import MixedEmbedding
from .experts import MixedExperts
from .linear import MixedLinear
from .model_embeddings import packed_embedding, reason_against_embedding
from .model_experts import GATE_UP, PRODUCTS, experts_form
from .quantizer_module import quantizer_module
from .weight_reads import Read, readers

_Model = TypeVar("_Model", bound=nn.Module)

#: The output head of most models. ``skip`` may name it where there is none.
_LM_HEAD = "lm_head"
#: What models of diffusers call their first and last convolutions.
_ENDS = ("conv_in", "conv_out")
#: Convolutions of torch, including those without a packed layer.
_ANY_CONVOLUTION = (*CONVOLUTIONS, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

#: Subclasses of torch.nn.Linear that compute the same and whose weights no other code reads.
_PLAIN_SUBCLASSES = ("transformers.models.falcon.modeling_falcon.FalconLinear",)

#: Classes of transformers that read weights of their children only with options that are off by
#: default, and whether an instance has switched one on.
_OPTIONAL_READS: dict[str, Callable[[Any], bool]] = dict.fromkeys(
    (
        "transformers.models.bloom.modeling_bloom.BloomAttention",
        "transformers.models.bloom.modeling_bloom.BloomMLP",
    ),
    lambda module: module.pretraining_tp > 1 and module.slow_but_exact,
)


#: Packed layers that the configuration of a model describes.
_SAVED = (MixedLinear, MixedConv, MixedEmbedding, MixedExperts)


@dataclass(frozen=True)
class Layer:
    """A layer of a model, linear, a convolution, of experts or an embedding.

    Attributes:
        name: its first name.
        places: the modules around it, with its name in each.
        tied: the embeddings that share its weight.
    """

    name: str
    places: list[tuple[nn.Module, str]]
    tied: list[Layer] = field(default_factory=list)

    @property
    def module(self) -> Any:
        """The present layer; not kept, so that only the model holds its weight."""
        parent, child = self.places[0]
        return parent._modules[child]

    def put(self, new: nn.Module) -> None:
        """Replace the layer in all its places."""
        for parent, child in self.places:
            parent._modules[child] = new

    @property
    def weights(self) -> list[tuple[str, Tensor]]:
        """Its weights, by their names."""
        parameters = self.module._parameters.items()
        return [
            (part, value.detach())
            for part, value in parameters
            if part != "bias" and not part.endswith("_bias")
        ]


def quantize_model(
    model: _Model,
    bits: int = 4,
    group_size: int = 128,
    symmetric: bool = False,
    act_quant: str = "none",
    skip: Collection[str] | None = None,
    book: str | Tensor | None = None,
    clip: str | None = None,
    convs: bool = False,
    embeddings: bool = False,
) -> _Model:
    """Quantise the linear layers of a model, with ``convs`` its convolutions and with
    ``embeddings`` its word embeddings: each linear layer becomes a
    :class:`cutlass_ops.MixedLinear`, each convolution a :class:`cutlass_ops.nn.MixedConv2d` or its
    like, each embedding a :class:`cutlass_ops.nn.MixedEmbedding`.

    Layers of experts that transformers 5 has as one module, as in Mixtral, Qwen3-MoE, DeepSeek-V3
    and gpt-oss, become :class:`cutlass_ops.nn.MixedExperts`.

        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float16, device_map="cuda")
        co.quantize_model(model, bits=4, group_size=128)

        unet = UNet2DConditionModel.from_pretrained(name, torch_dtype=torch.float16)
        co.quantize_model(unet, bits=8, act_quant="block", convs=True)

    Quantised are ``torch.nn.Linear`` and transformers' ``Conv1D`` (GPT-2), of any N and K, and with
    ``convs`` ``torch.nn.Conv1d``, ``Conv2d`` and ``Conv3d``. Each layer keeps its device, its bias
    (a buffer from then on), its training flag and its accelerate hook. Scales have the dtype of the
    weight. Packed layers are passed over. A model of transformers is converted before it is
    quantised, or loaded with the ``dtype`` that it shall have: transformers refuses ``half()`` and
    ``float()`` of a quantised model.

    Left as they are, with one warning that has their names and the reason, before the
    first layer changes:

    - subclasses of ``torch.nn.Linear``, such as layers of bitsandbytes and PEFT and the
      ``out_proj`` of ``torch.nn.MultiheadAttention``; Falcon's is quantised;
    - subclasses of torch's convolutions, such as timm's that pad x or standardise the weight in the
      call, transposed convolutions, and paddings that :func:`cutlass_ops.mixed_conv2d` does not
      have (reflected, or more on one side);
    - convolutions that packed would be larger, because the channels of a tap are padded to 128 and
      output channels to 64: those that read an image, depthwise ones, others of few channels or few
      output channels;
    - layers whose weight or bias is also another module's (tied heads without ``embeddings``), is
      computed (parametrizations, weight norm), or is not a plain fp16, bf16 or fp32 tensor, and
      layers with forward or backward hooks or an own ``forward``;
    - layers whose weight is read by the code of a module around them, such as Mamba's ``dt_proj``,
      ``x_proj`` and ``out_proj``, T5's ``wo`` and the MLP of ``torch.nn.TransformerEncoderLayer``.
      These are found in the source of the classes: chains like ``self.mlp.wo.weight``, also through
      variables, loops and arguments of methods. What is read otherwise raises an AttributeError
      when it is read, since a MixedLinear has no ``weight``;
    - other parameters of three dimensions outside of ``torch.nn``'s modules: experts of another
      formula, such as Llama 4's.

    Embeddings are quantised on request alone: ``torch.nn.Embedding`` and its subclasses that scale
    the rows as Gemma's does. Where an embedding and the output head share their weight, it is
    quantised once, also if the head is one that ``skip`` leaves by default; the head has the
    tensors, and the embedding becomes a :class:`cutlass_ops.nn.TiedEmbedding`.

    The configuration of a model of transformers or diffusers names its packed
    layers, so that ``from_pretrained`` reads what ``save_pretrained`` writes.

    The layers are quantised one after another where they are. At any time there are the model's
    unquantised layers, its quantised ones, and, for one layer, at most its float weight, its codes
    as bytes and their packed copy (the last two on the CPU for a moment, too). A weight's memory is
    freed when its layer is replaced, unless someone else, such as an optimiser, keeps it.

    Args:
        model: any module with such layers inside; changed in place.
        bits: 2, 4 or 8.
        group_size: 16, 32, 64, a multiple of 128, or -1 (one group for all of K). The last
            group may be short.
        symmetric: whether codes are centred on ``2**(bits-1)``; otherwise each group has an integer
            zero point. No meaning with ``book``.
        act_quant: how x is quantised, "none", "token" or "block"; with ``book`` only "none".
        skip: names of layers, or of modules with all their layers, to leave as they are: an entry
            matches a qualified name in which its dotted components stand next to each other.
            "lm_head" matches "lm_head" and "model.lm_head"; "layers.0" matches
            "model.layers.0.mlp.up_proj" and not "model.layers.01". An entry that matches no module
            is refused, but for "lm_head". None leaves output heads, which suffer most from few
            bits: "lm_head", and in models of transformers also what ``get_output_embeddings``
            returns and layers in modules named "classifier", "score", "qa_outputs" and "embed_out".
            With ``convs`` it also leaves "conv_in" and "conv_out", the first and last convolutions
            of models of diffusers. With ``()`` nothing is left.
        book: as in :func:`cutlass_ops.quantize`.
        clip: None or "mse", as in :func:`cutlass_ops.quantize`.
        convs: whether convolutions are quantised, too. Groups are ``group_size`` channels of a tap,
            of which the last may be short; -1 is one group for all taps.
        embeddings: whether embeddings are quantised, too.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: the model is not a module, or an argument has the wrong type.
        ValueError: an argument that is not supported; a model that is compiled, is itself the
            layer, or has no layer to quantise; a model of transformers or diffusers that another
            method quantised, or that has packed layers with another ``act_quant``; a weight without
            values (on the meta device), on a device that is neither CPU nor CUDA, or that has NaN
            or infinite values. All this is found before the first layer changes.
        RuntimeError: quantising a layer failed, as it does without enough memory (then a
            torch.OutOfMemoryError or MemoryError). The message names the layer. The model is
            usable: layers before it are quantised, the others are unchanged, and another call
            continues with them.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; a torch.nn.Module is expected")
    check_quantization(bits, group_size, symmetric, act_quant, skip, book, clip, convs, embeddings)
    if skip is not None:
        check_skip(model, skip)
    if any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules()):
        raise ValueError("the model is compiled; quantise it first, then compile it")
    if _is_layer(model, convs) or (embeddings and isinstance(model, nn.Embedding)):
        raise ValueError(
            f"the model is itself a {type(model).__name__} and cannot be replaced in place; "
            "make a layer of cutlass_ops of its weight (cutlass_ops.quantize, then "
            "cutlass_ops.reorder)"
        )
    quantizer = quantizer_module(model)
    packed = MixedLinear | MixedExperts | MixedConv
    before = {name: layer for name, layer in model.named_modules() if isinstance(layer, packed)}
    for name, layer in before.items():
        if quantizer is not None and layer.act_quant != act_quant:
            raise ValueError(
                f"{name!r} is packed with act_quant {layer.act_quant!r}, and {act_quant!r} "
                "is requested; "
                "such a model is saved with one (cutlass_ops.set_activations)"
            )
    chosen, left = layers_to_quantize(model, skip, bits, convs, embeddings)
    stays = "; ".join(f"{reason}: {', '.join(names)}" for reason, names in left.items())
    if not chosen and not before:
        kinds = [
            "linear layer",
            *(["convolution"] if convs else []),
            *(["embedding"] if embeddings else []),
        ]
        raise ValueError(
            f"the model has no {' or '.join(kinds)} to quantise" + (f" ({stays})" if stays else "")
        )
    for found in chosen:
        _check_values(found)
    if stays:
        warn(f"these stay as they are: {stays}", stacklevel=2)
    try:
        _replace(
            chosen,
            lambda layer: packed_layer(layer, bits, group_size, symmetric, act_quant, book, clip),
        )
    finally:  # what is done can be saved, even after an error
        if quantizer is not None and any(isinstance(module, _SAVED) for module in model.modules()):
            quantizer.attach(model)
    return model


def check_quantization(
    bits: int,
    group_size: int,
    symmetric: bool,
    act_quant: str,
    skip: Collection[str] | None,
    book: str | Tensor | None,
    clip: str | None,
    convs: bool,
    embeddings: bool,
) -> None:
    """Check the arguments of :func:`quantize_model` before there is a model.

    Raises:
        TypeError, ValueError: an argument that is not supported, or two that contradict each other.
    """
    check_options(bits, group_size, book, clip)
    if act_quant not in native.ACT_QUANT:
        raise ValueError(f"act_quant is {act_quant!r}; supported are 'none', 'token' and 'block'")
    for option, value in (("symmetric", symmetric), ("convs", convs), ("embeddings", embeddings)):
        if type(value) is not bool:
            raise TypeError(f"{option} is {value!r}; True or False is expected")
    if book is not None and act_quant != "none":
        raise ValueError(f"act_quant is {act_quant!r}; with a code book it is 'none'")
    if skip is not None and (
        isinstance(skip, str) or not all(isinstance(entry, str) and entry for entry in skip)
    ):
        raise TypeError(f"skip is {skip!r}; a tuple of module names is expected")


def check_skip(model: nn.Module, skip: Collection[str]) -> None:
    """Raise ValueError for an entry of :func:`quantize_model`'s ``skip`` that no module matches."""
    for entry in skip:
        if entry != _LM_HEAD and not any(
            _matches(name, (entry,)) for name, _ in model.named_modules()
        ):
            raise ValueError(f"skip has {entry!r}; the model has no module of that name")


def _matches(name: str, skip: Collection[str]) -> bool:
    return any(f".{entry}." in f".{name}." for entry in skip)


def _is_linear(module: nn.Module) -> bool:
    """Whether a module is ``torch.nn.Linear``, one of its subclasses, or the Conv1D
    of transformers.
    """
    return isinstance(module, nn.Linear) or (
        type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    )


def _is_layer(module: nn.Module, convs: bool) -> bool:
    """Whether a module is a linear layer, or, if it shall be, any convolution."""
    return _is_linear(module) or (convs and isinstance(module, _ANY_CONVOLUTION))


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def layers_to_quantize(
    model: nn.Module, skip: Collection[str] | None, bits: int, convs: bool, embeddings: bool
) -> tuple[list[Layer], dict[str, list[str]]]:
    """The layers to quantise, and the names of what is not quantised by reason, without those
    that ``skip`` names.

    The arguments are those of :func:`quantize_model`. Where ``skip`` is the default, it leaves no
    embedding, nor the head that shares its weight.
    """
    by_default = skip is None
    if skip is None:
        heads = output_heads(model) if hasattr(model, "get_output_embeddings") else ()
        skip = (_LM_HEAD, *heads, *(_ENDS if convs else ()))
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in names:
        for child, found in parent._modules.items():
            if found is not None:
                places.setdefault(found, []).append((parent, child))
    owners: dict[int, set[nn.Module]] = {}
    for module in names:
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(_address(parameter), set()).add(module)
    groups = _sharing(names) if embeddings else {}
    reading = readers(model, _happens)
    layers: list[Layer] = []
    left: dict[str, list[str]] = {}
    for module, its_names in names.items():
        group = groups.get(module, [module])
        if module is not group[0]:
            continue
        group_names = [name for member in group for name in names[member]]
        if not (by_default and module in groups) and any(
            _matches(name, skip) for name in group_names
        ):
            continue
        if module in groups or _is_layer(module, convs):
            reasons = [_reason_against(member, owners, group) for member in group]
            reasons += [
                f"{reading[n]} reads the weight itself" for n in group_names if n in reading
            ]
            reason = next(filter(None, reasons), "")
            if isinstance(module, CONVOLUTIONS):
                reason = reason or _reason_against_conv(module, bits)
            if reason:
                left.setdefault(reason, []).append(its_names[0])
            else:
                tied = [Layer(names[member][0], places[member]) for member in group[1:]]
                layers.append(Layer(its_names[0], places[module], tied))
        elif experts_form(module) is not None:
            layers.append(Layer(its_names[0], places[module]))
        elif not type(module).__module__.startswith("torch.nn."):
            for part, parameter in module._parameters.items():
                if parameter is not None and parameter.dim() == 3 and 1 not in parameter.shape:
                    left.setdefault("stacked weights of no linear layer", []).append(
                        f"{its_names[0]}.{part}"
                    )
    return layers, left


def _address(tensor: Tensor) -> int:
    """What two parameters have in common if they share memory: tied weights need
    not be one object.
    """
    plain = (
        type(tensor) is nn.Parameter and tensor.device.type in ("cpu", "cuda") and tensor.numel()
    )
    return tensor.data_ptr() if plain else id(tensor)


def _sharing(modules: Iterable[nn.Module]) -> dict[nn.Module, list[nn.Module]]:
    """The embeddings, and the linear layers that share a weight with one: each with all of them, a
    linear layer first.
    """
    by_weight: dict[int, list[nn.Module]] = {}
    for module in modules:
        if (
            isinstance(module, nn.Embedding | nn.Linear)
            and (weight := module._parameters.get("weight")) is not None
        ):
            by_weight.setdefault(_address(weight), []).append(module)
    groups = [
        sorted(group, key=lambda m: isinstance(m, nn.Embedding)) for group in by_weight.values()
    ]
    return {
        module: group for group in groups if isinstance(group[-1], nn.Embedding) for module in group
    }


def _reason_against(
    layer: Any, owners: dict[int, set[nn.Module]], group: Sequence[nn.Module]
) -> str:
    """Why a layer cannot be replaced, whatever is around it; "" if it can. All of ``group``
    have its weight.
    """
    kind = _qualified(type(layer))
    if (
        isinstance(layer, nn.Linear)
        and type(layer) is not nn.Linear
        and kind not in _PLAIN_SUBCLASSES
    ):
        return f"{kind} is a subclass of torch.nn.Linear"
    if isinstance(layer, _ANY_CONVOLUTION) and type(layer) not in CONVOLUTIONS:
        return f"{kind} is not torch.nn.Conv1d, Conv2d or Conv3d itself"
    if isinstance(layer, nn.Embedding) and (reason := reason_against_embedding(layer)):
        return reason
    parameters = layer._parameters
    expected = ("weight",) if isinstance(layer, nn.Embedding) else ("weight", "bias")
    if parameters.keys() != set(expected):
        return f"the parameters are {', '.join(parameters)}, not {' and '.join(expected)}"
    for part, parameter in parameters.items():
        if parameter is None:
            continue
        if type(parameter) is not nn.Parameter:
            return f"the {part} is a {type(parameter).__name__}"
        if parameter.dtype not in FLOAT_TYPES:
            return f"the {part} is {str(parameter.dtype).removeprefix('torch.')}"
        if parameter.numel() == 0:
            return f"the {part} is empty"
        linears = [member for member in group if not isinstance(member, nn.Embedding)]
        if owners[_address(parameter)] - (
            {*group} if part == "weight" and len(linears) < 2 else {layer}
        ):
            return f"the {part} is also another module's"
    hooks = (
        layer._forward_hooks,
        layer._forward_pre_hooks,
        layer._backward_hooks,
        layer._backward_pre_hooks,
    )
    if any(hooks):
        return "hooks are registered"
    if "forward" in vars(layer) and not hasattr(layer, "_hf_hook"):
        return "the layer's forward was replaced"
    return ""


def _reason_against_conv(conv: Any, bits: int) -> str:
    """Why a convolution that could be replaced is not; "" if it is."""
    try:
        padding_of(conv)
    except ValueError as error:
        return str(error)
    weight = conv.weight
    return (
        ""
        if formats.packed_bytes(weight.shape, bits) < weight.nbytes
        else "the packed weight would not be smaller"
    )


def _check_values(layer: Layer) -> None:
    """Raise ``ValueError`` if a layer's weight has no values or some that are not finite."""
    for part, weight in layer.weights:
        if weight.is_meta:
            raise ValueError(
                f"{layer.name!r}: the {part} is on the meta device (not loaded, or "
                "offloaded); it has no values"
            )
        arguments.check_device(weight.device)
        if not all(bound.isfinite() for bound in weight.aminmax()):
            raise ValueError(f"{layer.name!r}: the {part} has NaN or infinite values")


def _replace(chosen: list[Layer], packed: Callable[[Any], Any]) -> None:
    """Put the packed layer in the place of each, one after another."""
    from .progress import progress

    sizes = [sum(weight.nbytes for _, weight in layer.weights) for layer in chosen]
    with progress("quantising", sum(sizes)) as advance:
        for done, (layer, size) in enumerate(zip(chosen, sizes, strict=True)):
            try:
                new = packed(layer.module)
            except (MemoryError, RuntimeError, ValueError) as error:
                raise type(error)(
                    f"{layer.name!r}: {error}; {done} of {len(chosen)} layers were "
                    "quantised before it, "
                    "the others are as they were"
                ) from error
            layer.put(new)
            for tied in layer.tied:
                module = tied.module
                tied.put(_in_place_of(module, packed_embedding(module, new)))
            advance(layer.name, size)


def packed_layer(
    module: Any,
    bits: int,
    group_size: int,
    symmetric: bool,
    act_quant: str,
    book: str | Tensor | None,
    clip: str | None,
    **options: Any,
) -> nn.Module:
    """The packed layer that takes a layer's place; the arguments, of which others are ignored, are
    :func:`quantize_model`'s.
    """

    def quantized(weight: Tensor) -> QuantizedWeight:
        return quantize(weight, bits, group_size, symmetric, book, clip)

    layer: nn.Module
    if isinstance(module, nn.Embedding):
        layer = packed_embedding(module, reorder(quantized(module.weight.detach())))
    elif _is_layer(module, convs=True):
        weight = module.weight.detach()
        if _is_linear(module) and not isinstance(module, nn.Linear):
            weight = weight.t()  # Conv1D has [K, N]
        packed = reorder(quantized(weight))
        if module.bias is not None:
            packed = replace(packed, bias=module.bias.detach().contiguous())
        is_linear = _is_linear(module)
        layer = (
            MixedLinear(packed, act_quant)
            if is_linear
            else mixed_conv(module, packed, act_quant, act_symmetric=True)
        )
    else:
        form = experts_form(module)
        assert form is not None

        def experts(product: str) -> PackedExperts:
            stack, biases = (module._parameters.get(name) for name in (product, f"{product}_bias"))

            def expert(e: int) -> QuantizedWeight:
                weight = quantized(form.from_parameter(product, stack[e].detach()))
                return (
                    weight
                    if biases is None
                    else replace(weight, bias=form.from_parameter(product, biases[e].detach()))
                )

            return reorder_experts(WeightsOnDemand(len(stack), expert), gated=product == GATE_UP)

        gate_up, down = map(experts, PRODUCTS)
        layer = MixedExperts(gate_up, down, form.activation, act_quant)
    return _in_place_of(module, layer)


def _in_place_of(module: Any, layer: nn.Module) -> nn.Module:
    """A packed layer with the training flag and the accelerate hook of the float one."""
    layer.train(module.training)
    if hasattr(module, "_hf_hook"):
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(layer, module._hf_hook)
    return layer


def _happens(read: Read, module: nn.Module) -> bool:
    """Whether a module does a read of its class in a quantised model."""
    optional = _OPTIONAL_READS.get(_qualified(type(module)))
    return not read.asks and (optional is None or optional(module))
