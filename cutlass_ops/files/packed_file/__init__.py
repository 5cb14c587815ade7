"""Files of packed weights: safetensors.

Weight ``w`` is kept as ``w.codes``, ``w.scales`` and whichever of ``w.zeros``, ``w.offsets``,
``w.bias``, ``w.perm`` and ``w.book`` it has, shaped as in :class:`cutlass_ops.PackedWeight`; every
other tensor keeps its name. ``__metadata__``, all of it strings, has:

==================  ================================================================================
``format``          "pt", as other tools expect
``layout``          "cutlass_ops.slab64"
``layout_version``  "2", "3" if experts are gated, or "4" if other weights are; in version 1 the
                    last two lines of this table are missing
``weights``         JSON: ``{name: {"n": N, "k": K, "bits": 2, 4 or 8, "group_size": g}}``
``kernels``         JSON, if there are weights of convolutions: ``{name: [R, S]}``, the extents of
                    their kernels; K of ``weights`` is then R * S * C, and each tap's C channels are
                    padded to 128
``experts``         JSON, if a layer's experts are packed as one:
                    ``{name: {"experts": E, "n": N, "gated": true or false}}``; N of ``weights`` is
                    then E * N rounded up to 64, and ``perm`` is ``[E, K]``; ``gated`` is as in
                    :class:`cutlass_ops.PackedExperts`, false where it is missing
``gated``           JSON, if there are gated weights: ``{name: N}``; N of ``weights`` is then 2 * N,
                    the rows of gate and up, ordered as in :class:`cutlass_ops.PackedWeight`
``tied``            JSON: ``{name: other}``: weight ``name`` is also module ``other``'s, not stored
                    again
``sources``         JSON: ``{file name: sha256}`` of the checkpoint's files
``tool``            "cutlass_ops <version>"
``options``         JSON: how the checkpoint was read and its float matrices quantised
``config``          JSON, where it is known and the file is no shard of a directory: the model's
                    ``config.json``
``tensor_parallel``  JSON, if the file holds one rank's part:
                    ``{"rank": r, "size": R, "styles": {module: style}}``
``checksums``       JSON: ``{tensor: sha256}`` of the data of each tensor in the file, hexadecimal
``header_sha256``   of all bytes before the data, with 64 zeros in the place of these 64 digits
==================  ================================================================================

``verify`` checks the checksums; a loader, which does not read all data, cannot. The writer knows
them last, so it writes the header last: its length does not depend on them.

The experts of a model's layer are two weights, named as transformers names the parameters:
``model.layers.0.mlp.experts.gate_up_proj`` (gated) and ``model.layers.0.mlp.experts.down_proj``,
whatever names the checkpoint had.

Files that ``save_pretrained`` of transformers or diffusers wrote are recognised by the
``config.json`` beside them. They have the table's ``format``, ``weights``, ``kernels`` and
``experts``, the last three of the whole model in each shard. Where they lack these, ``config.json``
has bits and group size, and N and K are those of ``bias`` and ``perm`` or, without them, those of
the padded matrix.

A tied word embedding that its checkpoint quantised is packed once, as ``lm_head``, with ``tied``
naming ``model.embed_tokens``; a loader looks the embedding's rows up in it. (Directories that older
versions wrote have the table as a tensor and tie nothing.) A quantised weight that the user leaves
out (``--exclude``) is
stored as a tensor of the fp32 values that its file gives it, a tied embedding then as
``model.embed_tokens.weight``.
"""

from .info import PackedInfo, is_packed, packed_info
from .layout import Slices, check_names
from .load import load_packed, packed_problem, read_packed_weight
from .write import (
    experts_metadata,
    kernels_metadata,
    packed_metadata,
    save_packed,
    weights_metadata,
)

__all__ = [
    "PackedInfo",
    "Slices",
    "check_names",
    "experts_metadata",
    "is_packed",
    "kernels_metadata",
    "load_packed",
    "packed_info",
    "packed_metadata",
    "packed_problem",
    "read_packed_weight",
    "save_packed",
    "weights_metadata",
]
