"""Stored tensors of a quantised weight differ from the file's values only where a message says so;
models none of whose quantised weights can be packed.
"""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from imports import import_or_skip
from safetensors.torch import save_file
from typer.testing import CliRunner

import cutlass_ops as co
from cutlass_ops.checkpoints import Checkpoint
from cutlass_ops.cli import app
from cutlass_ops.files.conversion_plan import Options
from cutlass_ops.files.model_directory import reorder_model
from cutlass_ops.files.packed_file import load_packed, packed_info
from cutlass_ops.files.packing import reorder_checkpoint
from cutlass_ops.files.verify import verify_packed

# transformers' own parts warn of each other.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = import_or_skip("transformers")

SIZE, WORDS = 256, 96
SAID = "are rounded to 11 bits (model.embed_tokens.weight)"


def q6_k(rows: int, columns: int) -> np.ndarray[Any, Any]:
    """Blocks of random codes and positive scales."""
    blocks = np.random.default_rng(0).integers(0, 256, (rows, columns // 256, 210), dtype=np.uint8)
    blocks[..., 192:208] = blocks[..., 192:208] % 112 + 16
    blocks[..., 208:] = np.frombuffer(np.float16(2e-4).tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """A llama of one layer: a Q8_0 embedding that is the head too, one matrix of Q6_K."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(SIZE)
    writer.add_block_count(1)
    writer.add_feed_forward_length(SIZE)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    random = np.random.default_rng(1)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(SIZE, np.float32))
    for name in (
        "token_embd",
        *(
            f"blk.0.{part}"
            for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up")
        ),
    ):
        values = random.standard_normal((WORDS if name == "token_embd" else SIZE, SIZE)).astype(
            np.float32
        )
        writer.add_tensor(
            f"{name}.weight", gguf.quants.quantize(values, Type.Q8_0), raw_dtype=Type.Q8_0
        )
    writer.add_tensor("blk.0.ffn_down.weight", q6_k(SIZE, SIZE), raw_dtype=Type.Q6_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_q6_k_is_exact(model_file: Path, tmp_path: Path) -> None:
    checkpoint = co.load_checkpoint(model_file)
    name = "model.layers.0.mlp.down_proj"
    exact = checkpoint.entries[name].values()
    reorder_checkpoint(checkpoint, tmp_path / "p.safetensors")
    packed = load_packed(tmp_path / "p.safetensors")[name]
    assert isinstance(packed, co.PackedWeight)
    assert torch.equal(co.dequantize(packed, torch.float32), exact)


def test_every_command_says_what_is_rounded(model_file: Path, tmp_path: Path) -> None:
    def run(*arguments: object) -> str:
        result = CliRunner().invoke(app, [*map(str, arguments)])
        assert result.exit_code == 0, result.output
        return result.output

    assert "rounded" not in run("inspect", model_file)
    for output in (tmp_path / "packed", tmp_path / "p.safetensors"):
        assert "rounded" not in run("reorder", model_file, "-o", output)
    arguments = ("reorder", model_file, "-o", tmp_path / "plain", "--exclude", "lm_head")
    text = run(*arguments)
    assert "rounded  1: " in text
    assert SAID in text
    assert json.loads(run(*arguments, "--json"))["rounded"].keys() == {"model.embed_tokens.weight"}
    co.load_model(model_file)


def with_a_table(model_file: Path, **config: Any) -> Checkpoint:
    """The checkpoint, of a model that is not known: whether it looks plain rows up is
    not known either.
    """
    checkpoint = co.load_checkpoint(model_file)
    return replace(checkpoint, config={**checkpoint.config, "model_type": "another", **config})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_quantised_table_is_stored_in_the_models_dtype(
    dtype: str, model_file: Path, tmp_path: Path
) -> None:
    checkpoint = with_a_table(model_file, dtype=dtype)
    done = reorder_model(checkpoint, tmp_path / "packed")
    table = load_packed(tmp_path / "packed")["model.embed_tokens.weight"]
    exact = checkpoint.entries["lm_head"].values()
    assert isinstance(table, torch.Tensor)
    assert torch.equal(table, exact.to(getattr(torch, dtype)))
    assert done.kept == {"model.embed_tokens": "it is not known as a word embedding of its model"}
    assert ("model.embed_tokens.weight" in done.rounded) == (dtype != "float32")
    found = verify_packed(tmp_path / "packed", checkpoint)
    assert found.problems == []
    largest = float((table.float() - exact).abs().max())
    assert found.largest_difference is not None
    assert found.largest_difference >= largest


def test_a_table_that_differs_is_found(model_file: Path, tmp_path: Path) -> None:
    checkpoint = with_a_table(model_file)
    reorder_model(checkpoint, tmp_path / "packed")
    name = "model.embed_tokens.weight"
    values = checkpoint.entries["lm_head"].values

    def other() -> torch.Tensor:
        changed = values()
        changed[3, 5] += 1
        return changed

    head = replace(checkpoint.entries["lm_head"], values=other)
    found = verify_packed(
        tmp_path / "packed", replace(checkpoint, entries={**checkpoint.entries, "lm_head": head})
    )
    assert f"{name}: differs from the checkpoint's" in found.problems


def test_values_beyond_the_models_dtype_are_refused(model_file: Path, tmp_path: Path) -> None:
    checkpoint = with_a_table(model_file)
    head = checkpoint.entries["lm_head"]
    entries = {**checkpoint.entries, "lm_head": replace(head, values=lambda: head.values() * 1e5)}
    with pytest.raises(
        co.CheckpointError, match=r"holds values up to .*; torch\.float16 has no such"
    ):
        reorder_model(replace(checkpoint, entries=entries), tmp_path / "packed")


def test_a_weight_left_out_is_rounded_to_the_models_dtype_alone(
    model_file: Path, tmp_path: Path
) -> None:
    checkpoint = co.load_checkpoint(model_file)
    for dtype, rounded in (
        ("float32", set()),
        ("float16", {"model.layers.0.mlp.down_proj.weight"}),
    ):
        checkpoint = replace(checkpoint, config={**checkpoint.config, "dtype": dtype})
        assert reorder_model(checkpoint, tmp_path / f"whole {dtype}").rounded == {}
        options = Options(exclude="down_proj")
        done = reorder_model(checkpoint, tmp_path / f"packed {dtype}", options)
        assert done.rounded.keys() == rounded


@pytest.mark.parametrize("kind", [Type.Q8_K, Type.IQ4_NL])
def test_leaving_out_is_advised_only_where_it_works(kind: Type, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "other")
    block = gguf.GGML_QUANT_SIZES[kind][1]
    writer.add_tensor("a.weight", np.zeros((4, block), np.uint8), raw_dtype=kind)
    writer.add_tensor(
        "b.weight",
        gguf.quants.quantize(np.ones((32, 32), np.float32), Type.Q8_0),
        raw_dtype=Type.Q8_0,
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = co.load_checkpoint(tmp_path / "m.gguf")
    with pytest.raises(co.CheckpointError, match=f"'a.weight': has type {kind.name}") as refused:
        reorder_checkpoint(checkpoint, tmp_path / "p.safetensors")
    assert ("leave it out (--exclude)" in str(refused.value)) == (kind == Type.IQ4_NL)
    if kind == Type.IQ4_NL:
        reorder_checkpoint(checkpoint, tmp_path / "p.safetensors", exclude="^a$")
        assert "a.weight" in packed_info(tmp_path / "p.safetensors").tensors
    else:
        with pytest.raises(co.CheckpointError, match="has type"):
            reorder_checkpoint(checkpoint, tmp_path / "p.safetensors", exclude="^a$", dry_run=True)


@pytest.fixture
def experts_alone(tmp_path: Path) -> tuple[Path, Any]:
    """A mixture of experts of which the routed experts alone are quantised; the model of its
    values.
    """
    torch.manual_seed(0)
    config = transformers.Qwen2MoeConfig(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=64,
        shared_expert_intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, num_experts=2, num_experts_per_tok=1,
        vocab_size=96, dtype="float32",
    )  # fmt: skip
    model = transformers.Qwen2MoeForCausalLM(config).eval()
    state = {
        name: value.clone() for name, value in model.state_dict().items() if ".experts." not in name
    }
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        for e in range(2):
            gate, up = experts.gate_up_proj[e].view(2, 64, 64)
            for name, matrix in (("gate", gate), ("up", up), ("down", experts.down_proj[e])):
                scales = matrix.abs().amax(1, keepdim=True) / 127
                codes = (matrix / scales).round()
                matrix.copy_(codes * scales)
                module = f"model.layers.0.mlp.experts.{e}.{name}_proj"
                state |= {
                    f"{module}.weight": codes.to(torch.int8),
                    f"{module}.weight_scale": scales,
                }
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": groups,
    }
    source = tmp_path / "experts"
    source.mkdir()
    (source / "config.json").write_text(
        json.dumps({**config.to_dict(), "quantization_config": settings})
    )
    save_file(state, source / "model.safetensors")
    return source, model


def test_experts_that_alone_are_quantised_are_packed(
    experts_alone: tuple[Path, Any], tmp_path: Path
) -> None:
    source, model = experts_alone
    reorder_model(co.load_checkpoint(source), tmp_path / "packed")
    ids = torch.arange(8)[None]
    for loaded in (co.load_model(source), co.load_model(tmp_path / "packed")):
        packed = [
            module
            for module in loaded.modules()
            if isinstance(module, (co.MixedLinear, co.nn.MixedExperts))
        ]
        assert packed
        assert all(isinstance(module, co.nn.MixedExperts) for module in packed)
        assert torch.allclose(loaded(ids).logits, model(ids).logits, atol=1e-4)
