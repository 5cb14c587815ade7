"""Reader of GGUF: exact on files of the format's writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf_files import write_gguf
from imports import import_or_skip
from safetensors.torch import save_file

from cutlass_ops import CheckpointError, PackedWeight, load_checkpoint, load_packed, reference
from cutlass_ops.files.packed_file import packed_info
from cutlass_ops.files.packing import reorder_checkpoint
from cutlass_ops.files.verify import verify_packed

RANDOM = np.random.default_rng(7)


#: Where a block holds its fp16 numbers.
NUMBERS = {
    Type.Q4_0: [0],
    Type.Q4_1: [0, 2],
    Type.Q5_0: [0],
    Type.Q5_1: [0, 2],
    Type.Q8_0: [0],
    Type.Q2_K: [80, 82],
    Type.Q3_K: [108],
    Type.Q4_K: [0, 2],
    Type.Q5_K: [0, 2],
    Type.Q6_K: [208],
}


def blocks(kind: Type, n: int, k: int) -> npt.NDArray[np.uint8]:
    """Random codes under random scales, of either sign."""
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = RANDOM.integers(0, 256, (n, k // size, nbytes), dtype=np.uint8)
    for start in NUMBERS[kind]:
        raw[..., start : start + 2] = (
            RANDOM.standard_normal((n, k // size, 1)).astype(np.float16).view(np.uint8)
        )
    return raw.reshape(n, -1)


@pytest.mark.parametrize("kind", list(NUMBERS))
def test_values_are_those_of_the_format(tmp_path: Path, kind: Type) -> None:
    raw = blocks(kind, 48, 768)
    path = write_gguf(tmp_path / "m.gguf", {"w.weight": (raw, kind)}, "other")
    checkpoint = load_checkpoint(path)
    values = torch.from_numpy(gguf.dequantize(raw, kind))
    assert torch.equal(checkpoint.entries["w"].values(), values)
    weight = checkpoint["w"]
    assert {"scales": weight.scales.dtype} | (
        {} if weight.offsets is None else {"offsets": weight.offsets.dtype}
    ) == (checkpoint.entries["w"].quantized.dtypes)
    ours = reference.dequantize_weight(weight, torch.float32)
    if kind in (Type.Q4_1, Type.Q4_K):
        # The offset is rounded to fp32 once more.
        assert weight.offsets is not None
        limit = weight.offsets.abs().repeat_interleave(32, 1) * 2.0**-24
        assert bool(((ours - values).abs() <= limit + values.abs() * 2.0**-23).all())
    else:
        assert torch.equal(ours, values)


@pytest.mark.parametrize("kind", list(NUMBERS))
def test_a_weight_is_converted_piece_by_piece(
    tmp_path: Path, kind: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"w": (blocks(kind, 7, 512), kind)}, "other")
    whole = load_checkpoint(path)["w"]
    monkeypatch.setattr("cutlass_ops.checkpoints.gguf_blocks._BYTES_AT_A_TIME", 1200)
    pieces = load_checkpoint(path)["w"]
    for part in ("codes", "scales", "offsets"):
        a, b = getattr(whole, part), getattr(pieces, part)
        assert (a is None and b is None) or torch.equal(a, b)


def test_a_weight_that_starts_at_an_odd_byte(tmp_path: Path) -> None:
    keys = (Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q6_K)
    tensors = {kind.name: (blocks(kind, 3, 256), kind) for kind in keys}
    aligned = load_checkpoint(write_gguf(tmp_path / "a.gguf", tensors, "other"))
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "other")
    writer.add_custom_alignment(1)
    writer.add_tensor("odd", np.zeros(1, np.int8), raw_dtype=Type.I8)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    odd = load_checkpoint(tmp_path / "b.gguf")
    for name in tensors:
        assert torch.equal(odd[name].codes, aligned[name].codes)
        assert torch.equal(odd[name].scales, aligned[name].scales)


def converted(weights: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """``permute`` of llama.cpp's convert_hf_to_gguf.py, what its converter does to q and k rows."""
    n = weights.shape[0]
    halves = weights.reshape(heads, 2, n // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


@pytest.mark.parametrize("kind", [*NUMBERS, Type.F32, Type.F16])
def test_the_rows_of_q_and_k_are_put_back(tmp_path: Path, kind: Type) -> None:
    if kind in (Type.F32, Type.F16):
        q, k = (
            RANDOM.standard_normal((n, 64)).astype(np.float32 if kind == Type.F32 else np.float16)
            for n in (64, 32)
        )
    else:
        q, k = blocks(kind, 64, 256), blocks(kind, 32, 256)
    kept = {"blk.3.attn_v.weight": (k, kind)}
    as_it_was = load_checkpoint(
        write_gguf(tmp_path / "a.gguf", {"q.weight": (q, kind), "k.weight": (k, kind)}, "other")
    )
    path = write_gguf(
        tmp_path / "b.gguf",
        {
            "blk.3.attn_q.weight": (converted(q, 4), kind),
            "blk.3.attn_k.weight": (converted(k, 2), kind),
            **kept,
        },
        head_count=4,
        head_count_kv=2,
    )
    read = load_checkpoint(path)
    prefix = "model.layers.3.self_attn."
    for ours, name in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "k")):
        if kind in (Type.F32, Type.F16):
            assert torch.equal(
                dict(read.plain())[f"{prefix}{ours}.weight"],
                dict(as_it_was.plain())[f"{name}.weight"],
            )
            continue
        a, b = read[prefix + ours], as_it_was[name]
        assert torch.equal(a.codes, b.codes)
        assert torch.equal(a.scales, b.scales)
        assert (a.offsets is None and b.offsets is None) or torch.equal(a.offsets, b.offsets)
        assert torch.equal(read.entries[prefix + ours].values(), as_it_was.entries[name].values())


def test_the_rows_agree_with_transformers(tmp_path: Path) -> None:
    loader = import_or_skip("transformers.modeling_gguf_pytorch_utils")
    processor = loader.LlamaTensorProcessor({"num_attention_heads": 6, "num_key_value_heads": 3})
    raw = {
        name: RANDOM.standard_normal((96, 8)).astype(np.float32)
        for name in ("attn_q", "attn_k", "attn_v")
    }
    path = write_gguf(
        tmp_path / "m.gguf",
        {f"blk.0.{name}.weight": (value, Type.F32) for name, value in raw.items()},
        head_count=6,
        head_count_kv=3,
    )
    plain = dict(load_checkpoint(path).plain())
    for name, value in raw.items():
        expected = processor.process(value, f"blk.0.{name}.weight").weights
        assert torch.equal(
            plain[f"model.layers.0.self_attn.{name[-1]}_proj.weight"],
            torch.from_numpy(np.array(expected)),
        )


def test_without_a_count_of_key_heads_there_are_as_many(tmp_path: Path) -> None:
    k = np.arange(32, dtype=np.float32)[:, None]
    path = write_gguf(
        tmp_path / "m.gguf", {"blk.0.attn_k.weight": (converted(k, 4), Type.F32)}, head_count=4
    )
    ((_, values),) = load_checkpoint(path).plain()
    assert values[:, 0].tolist() == list(range(32))


@pytest.mark.parametrize("keys", [{}, {"head_count": 0}, {"head_count": 5}])
def test_rows_that_cannot_be_put_back(tmp_path: Path, keys: dict[str, int]) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        {"blk.0.attn_q.weight": (np.zeros((64, 4), np.float32), Type.F32)},
        **keys,
    )
    with pytest.raises(CheckpointError, match="heads of attention") as raised:
        load_checkpoint(path)
    assert raised.value.tensor == "blk.0.attn_q.weight"


def test_other_architectures_keep_their_rows_and_names(tmp_path: Path) -> None:
    q = RANDOM.standard_normal((64, 4)).astype(np.float32)
    tensors = {"blk.0.attn_q.weight": (q, Type.F32), "output_norm.weight": (q[0], Type.F32)}
    qwen = dict(
        load_checkpoint(write_gguf(tmp_path / "a.gguf", tensors, "qwen2", head_count=4)).plain()
    )
    assert torch.equal(qwen["model.layers.0.self_attn.q_proj.weight"], torch.from_numpy(q))
    other = dict(
        load_checkpoint(write_gguf(tmp_path / "b.gguf", tensors, "other", head_count=4)).plain()
    )
    assert torch.equal(other["blk.0.attn_q.weight"], torch.from_numpy(q))
    assert "output_norm.weight" in other


def test_names_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = import_or_skip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_bias=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    tensors = {}
    for name, value in model.state_dict().items():
        module, _, suffix = name.rpartition(".")
        tensors[f"{names.get_name(module)}.{suffix}"] = (
            np.zeros(tuple(value.shape), np.float32),
            Type.F32,
        )
    path = write_gguf(tmp_path / "m.gguf", tensors, head_count=2, head_count_kv=2)
    assert {name for name, _ in load_checkpoint(path).plain()} == set(model.state_dict())


def test_names_that_only_look_like_those_of_a_layer(tmp_path: Path) -> None:
    zero = (np.zeros(4, np.float32), Type.F32)
    names = [
        "rope_freqs.weight",
        "attn_norm.weight",
        "blk.0.output_norm.weight",
        "blk.0.what.weight",
        "blk.x.ffn_up.weight",
        "blk.\u0663.ffn_up.weight",
    ]
    path = write_gguf(tmp_path / "m.gguf", dict.fromkeys(names, zero))
    assert [name for name, _ in load_checkpoint(path).plain()] == names


def test_plain_tensors_keep_their_type(tmp_path: Path) -> None:
    values = RANDOM.standard_normal((3, 5)).astype(np.float32)
    bits = gguf.quantize(values, Type.BF16)
    tensors = {
        "a": (values, Type.F32),
        "b": (values.astype(np.float16), Type.F16),
        "c": (bits, Type.BF16),
        "d": (values.astype(np.float64), Type.F64),
        "e": (np.arange(4, dtype=np.int32), Type.I32),
    }
    path = write_gguf(tmp_path / "m.gguf", tensors, "other")
    plain = dict(load_checkpoint(path).plain())
    x = torch.from_numpy(values)
    expected = {
        "a": x,
        "b": x.half(),
        "c": x.bfloat16(),
        "d": x.double(),
        "e": torch.arange(4, dtype=torch.int32),
    }
    for name, value in expected.items():
        assert plain[name].dtype == value.dtype
        assert torch.equal(plain[name], value)


def test_a_tied_embedding_is_the_head(tmp_path: Path) -> None:
    raw = blocks(Type.Q8_0, 50, 64)
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": (raw, Type.Q8_0)})
    checkpoint = load_checkpoint(path)
    assert list(checkpoint) == ["lm_head"]
    assert checkpoint.entries["lm_head"].source == "token_embd.weight"
    reorder_checkpoint(checkpoint, tmp_path / "p.safetensors")
    assert packed_info(tmp_path / "p.safetensors").tied == {"lm_head": "model.embed_tokens"}
    # Left out, it is a table of the values.
    both = {"token_embd.weight": (raw, Type.Q8_0), "blk.0.ffn_up.weight": (raw, Type.Q8_0)}
    checkpoint = load_checkpoint(write_gguf(tmp_path / "b.gguf", both))
    reorder_checkpoint(checkpoint, tmp_path / "q.safetensors", exclude="lm_head")
    table = load_packed(tmp_path / "q.safetensors")["model.embed_tokens.weight"]
    assert isinstance(table, torch.Tensor)
    assert torch.equal(table, torch.from_numpy(gguf.dequantize(raw, Type.Q8_0)))
    assert packed_info(tmp_path / "q.safetensors").tied == {}
    assert verify_packed(tmp_path / "q.safetensors", checkpoint).problems == []


def test_an_embedding_beside_a_head_stays_itself(tmp_path: Path) -> None:
    raw = blocks(Type.Q8_0, 50, 64)
    tensors = {"token_embd.weight": (raw, Type.Q8_0), "output.weight": (raw, Type.Q8_0)}
    checkpoint = load_checkpoint(write_gguf(tmp_path / "m.gguf", tensors))
    assert sorted(checkpoint) == ["lm_head", "model.embed_tokens"]
    plain = {"token_embd.weight": (np.zeros((4, 4), np.float32), Type.F32)}
    assert list(load_checkpoint(write_gguf(tmp_path / "f.gguf", plain)).entries) == [
        "model.embed_tokens.weight"
    ]


def test_a_bias_goes_with_its_weight(tmp_path: Path) -> None:
    bias = RANDOM.standard_normal(64).astype(np.float32)
    tensors = {
        "blk.0.attn_q.weight": (blocks(Type.Q4_0, 64, 32), Type.Q4_0),
        "blk.0.attn_q.bias": (converted(bias, 4), Type.F32),
        "blk.0.attn_v.weight": (blocks(Type.Q4_0, 64, 32), Type.Q4_0),
        "output_norm.bias": (bias, Type.F32),
    }
    checkpoint = load_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, head_count=4))
    weight = checkpoint["model.layers.0.self_attn.q_proj"]
    assert weight.bias is not None
    assert torch.equal(weight.bias, torch.from_numpy(bias))
    assert [name for name, _ in checkpoint.plain()] == ["model.norm.bias"]
    reorder_checkpoint(checkpoint, tmp_path / "p.safetensors")
    packed = load_packed(tmp_path / "p.safetensors")["model.layers.0.self_attn.q_proj"]
    assert isinstance(packed, PackedWeight)
    assert packed.bias is not None
    assert torch.equal(packed.bias, weight.bias)
    reorder_checkpoint(checkpoint, tmp_path / "p.safetensors", exclude="q_proj")
    loaded = load_packed(tmp_path / "p.safetensors")
    assert torch.equal(loaded["model.layers.0.self_attn.q_proj.bias"], weight.bias)
    assert verify_packed(tmp_path / "p.safetensors", checkpoint).problems == []


def test_a_bias_of_another_size_is_refused(tmp_path: Path) -> None:
    tensors = {
        "a.weight": (blocks(Type.Q4_0, 64, 32), Type.Q4_0),
        "a.bias": (np.zeros(32, np.float32), Type.F32),
    }
    checkpoint = load_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, "other"))
    assert checkpoint["a"].bias is None
    with pytest.raises(CheckpointError, match=r"tensor 'a\.bias' cannot keep its name"):
        reorder_checkpoint(checkpoint, tmp_path / "p.safetensors")


def test_types_that_cannot_be_packed_are_named(tmp_path: Path) -> None:
    raw = blocks(Type.Q4_0, 4, 64)
    k_quant = np.zeros((4, gguf.GGML_QUANT_SIZES[Type.IQ4_XS][1]), np.uint8)
    tensors = {
        "a.weight": (raw, Type.Q4_0),
        "b.weight": (k_quant, Type.IQ4_XS),
        "c": (raw.reshape(2, 2, -1), Type.Q4_0),
    }
    checkpoint = load_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, "other"))
    assert list(checkpoint) == ["a"]
    assert list(checkpoint.plain()) == []
    with pytest.raises(CheckpointError, match=r"tensor 'b\.weight': has type IQ4_XS"):
        checkpoint["b"]
    with pytest.raises(CheckpointError, match=r"shape \[2, 2, 64\]"):
        checkpoint["c"]
    with pytest.raises(KeyError):
        checkpoint["nothing"]
    with pytest.raises(CheckpointError, match="--exclude"):
        reorder_checkpoint(checkpoint, tmp_path / "p.safetensors")
    reorder_checkpoint(checkpoint, tmp_path / "p.safetensors", exclude="b|c")
    loaded = load_packed(tmp_path / "p.safetensors")
    assert torch.equal(loaded["b.weight"], torch.zeros(4, 256))
    assert torch.equal(
        loaded["c.weight"],
        torch.from_numpy(gguf.dequantize(raw, Type.Q4_0)).view(2, 2, 64),
    )
    assert verify_packed(tmp_path / "p.safetensors", checkpoint).problems == []


def test_a_gguf_of_floats_is_quantised_on_request(tmp_path: Path) -> None:
    values = RANDOM.standard_normal((32, 48)).astype(np.float16)
    tensors = {"blk.0.ffn_up.weight": (values, Type.F16), "token_embd.weight": (values, Type.F16)}
    checkpoint = load_checkpoint(write_gguf(tmp_path / "m.gguf", tensors))
    with pytest.raises(ValueError, match="give bits"):
        reorder_checkpoint(checkpoint, tmp_path / "p.safetensors")
    done = reorder_checkpoint(checkpoint, tmp_path / "p.safetensors", bits=8, group_size=-1)
    assert done.weights == {"model.layers.0.mlp.up_proj": (32, 48, 8, -1)}
    assert done.tensors == ("model.embed_tokens.weight",)


def test_the_search_for_a_range_is_remembered(tmp_path: Path) -> None:
    w = torch.from_numpy(RANDOM.standard_normal((32, 256)).astype(np.float32))
    save_file({"a.weight": w}, tmp_path / "m.safetensors")
    source = load_checkpoint(tmp_path / "m.safetensors")
    path = tmp_path / "p.safetensors"
    errors = []
    for clip in (None, "mse"):
        reorder_checkpoint(source, path, bits=4, group_size=64, clip=clip)
        packed = load_packed(path)["a"]
        assert isinstance(packed, PackedWeight)
        errors.append(
            float((reference.dequantize_weight(packed.unpack(), torch.float32) - w).square().sum())
        )
        assert verify_packed(path, source).problems == []
        assert packed_info(path).options["clip"] == clip
    assert errors[1] < 0.98 * errors[0]
    with pytest.raises(ValueError, match="clip is 'mean'"):
        reorder_checkpoint(source, path, bits=4, clip="mean")


def test_the_header_is_read_as_gguf_reads_it(tmp_path: Path) -> None:
    tensors = {
        "token_embd.weight": (blocks(Type.Q8_0, 50, 64), Type.Q8_0),
        "blk.0.ffn_up.weight": (blocks(Type.Q4_1, 32, 64), Type.Q4_1),
        "output_norm.weight": (np.ones(3, np.float32), Type.F32),
    }
    path = write_gguf(tmp_path / "m.gguf", tensors)
    theirs = {
        tensor.name: (
            tensor.tensor_type.name,
            tuple(map(int, reversed(tensor.shape))),
            tensor.n_bytes,
        )
        for tensor in gguf.GGUFReader(path).tensors
    }
    checkpoint = load_checkpoint(path)
    assert {e.source: (e.kind, e.shape, e.nbytes) for e in checkpoint.entries.values()} == theirs
    assert checkpoint.metadata["general.architecture"] == "llama"
    assert not [key for key in checkpoint.metadata if key.startswith("tokenizer")]


def test_verify_does_not_lose_a_nan(tmp_path: Path) -> None:
    raw = {name: blocks(Type.Q8_0, 2, 32) for name in "abc"}
    source = write_gguf(tmp_path / "m.gguf", {n: (r, Type.Q8_0) for n, r in raw.items()}, "other")
    reorder_checkpoint(load_checkpoint(source), tmp_path / "p.safetensors")
    raw["b"][0, :2] = 0x7F  # a scale of NaN
    write_gguf(source, {n: (r, Type.Q8_0) for n, r in raw.items()}, "other")
    with pytest.raises(CheckpointError, match=r"'b': scales\[0, 0\] is nan"):
        verify_packed(tmp_path / "p.safetensors", load_checkpoint(source))
