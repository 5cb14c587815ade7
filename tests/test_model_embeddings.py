"""Quantised embeddings of models stay packed: from GGUF files and in memory, tied with the head or
alone, saved and loaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from imports import import_or_skip
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import cutlass_ops as co
from cutlass_ops.files import Options
from cutlass_ops.files.model_directory import reorder_model
from cutlass_ops.files.packed_file import packed_info
from cutlass_ops.files.packing import reorder_checkpoint
from cutlass_ops.files.verify import verify_packed
from cutlass_ops.nn import MixedEmbedding, TiedEmbedding

transformers = import_or_skip("transformers")

SIZE, WORDS = 128, 192
IDS = torch.tensor([[3, 1, 4, 1, 5, 191]])
EMBED = "model.embed_tokens"


def write_model(
    path: Path, architecture: str = "llama", table: Type = Type.Q8_0, head: Type | None = None
) -> Path:
    """A GGUF model of one layer, with an output head if it has a type."""
    random = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(SIZE)
    writer.add_block_count(1)
    writer.add_feed_forward_length(SIZE)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    if architecture == "gemma3":
        writer.add_key_length(SIZE // 4)
    norms = [
        "attn_norm",
        "ffn_norm",
        *(["attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm"]),
    ]
    for name in norms if architecture == "gemma3" else norms[:2]:
        writer.add_tensor(
            f"blk.0.{name}.weight",
            np.ones(SIZE // 4 if name[:6] in ("attn_q", "attn_k") else SIZE, np.float32),
        )
    writer.add_tensor("output_norm.weight", np.ones(SIZE, np.float32))
    layer = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    kinds = {"token_embd": table, "output": head, **{f"blk.0.{name}": Type.Q8_0 for name in layer}}
    for name, kind in kinds.items():
        if kind is not None:
            values = random.standard_normal((WORDS if "." not in name else SIZE, SIZE)).astype(
                np.float32
            )
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found


def with_a_float_table(model: Any) -> Tensor:
    """The logits with a float embedding of the same values in the packed one's place."""
    packed = model.get_input_embeddings()
    table = nn.Embedding.from_pretrained(packed.dequantize(packed.dtype))
    scaled = nn.Module()
    scaled.forward = lambda ids: table(ids) * torch.tensor(packed.scale).to(packed.dtype)
    model.set_input_embeddings(scaled)
    found = logits(model)
    model.set_input_embeddings(packed)
    return found


def loaded(path: Path) -> list[Any]:
    return [
        transformers.AutoModelForCausalLM.from_pretrained(path),
        co.load_model(path, fuse=False),
    ]


# ---- checkpoints


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_tied_embedding_is_the_packed_head(architecture: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "m.gguf", architecture)
    checkpoint = co.load_checkpoint(source)
    reorder_model(checkpoint, tmp_path / "packed")
    assert verify_packed(tmp_path / "packed", checkpoint).problems == []
    info = packed_info(tmp_path / "packed")
    assert info.tied == {"lm_head": EMBED}
    assert f"{EMBED}.weight" not in info.tensors
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert config["quantization_config"]["embeddings"] == {EMBED: "lm_head"}
    assert sum(file.stat().st_size for file in info.files) < 1.2 * source.stat().st_size
    reorder_checkpoint(checkpoint, tmp_path / "p.safetensors")
    of_file = co.load_model(tmp_path / "p.safetensors", fuse=False)
    expected = logits(of_file)
    for model in (of_file, co.load_model(source, fuse=False), *loaded(tmp_path / "packed")):
        embedding = model.get_input_embeddings()
        assert isinstance(embedding, TiedEmbedding)
        assert embedding.layer is model.lm_head
        assert embedding.scale == (pytest.approx(SIZE**0.5) if architecture == "gemma3" else 1)
        assert (
            embedding.dtype
            == model.dtype
            == (torch.bfloat16 if architecture == "gemma3" else torch.float16)
        )
        assert not any(parameter.shape[0] == WORDS for parameter in model.parameters())
        assert torch.equal(logits(model), expected)
        assert torch.equal(with_a_float_table(model), expected)


def test_an_embedding_beside_a_head_is_packed_by_itself(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m.gguf", table=Type.Q4_0, head=Type.Q8_0)
    checkpoint = co.load_checkpoint(source)
    reorder_model(checkpoint, tmp_path / "packed")
    assert verify_packed(tmp_path / "packed", checkpoint).problems == []
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert config["quantization_config"]["embeddings"] == {EMBED: EMBED}
    expected = co.dequantize(checkpoint[EMBED], torch.float16)[IDS]
    for model in (co.load_model(source, fuse=False), *loaded(tmp_path / "packed")):
        embedding = model.get_input_embeddings()
        assert isinstance(embedding, MixedEmbedding)
        assert embedding.packed.bits == 4
        assert torch.equal(embedding(IDS), expected)
        assert torch.equal(with_a_float_table(model), logits(model))


def test_float_embeddings_stay_unless_they_are_named(tmp_path: Path) -> None:
    tiny("Llama", tie_word_embeddings=False).save_pretrained(tmp_path / "float")
    checkpoint = co.load_checkpoint(tmp_path / "float")
    reorder_model(checkpoint, tmp_path / "plain", Options(8, 32))
    assert type(loaded(tmp_path / "plain")[0].get_input_embeddings()) is nn.Embedding
    reorder_model(checkpoint, tmp_path / "packed", Options(8, 32, include="embed_tokens|_proj"))
    for model in loaded(tmp_path / "packed"):
        assert isinstance(model.get_input_embeddings(), MixedEmbedding)
        assert isinstance(model.lm_head, nn.Linear)


def test_a_head_that_is_split_over_ranks_is_not_used_as_the_embedding(tmp_path: Path) -> None:
    checkpoint = co.load_checkpoint(write_model(tmp_path / "m.gguf"))
    with pytest.raises(
        ValueError,
        match=r"'lm_head' cannot be colwise: every rank looks up rows of 'model.embed_tokens'",
    ):
        reorder_model(checkpoint, tmp_path / "packed", ranks=2, splits=[("lm_head", "colwise")])
    reorder_model(checkpoint, tmp_path / "whole", ranks=2)


def test_a_directory_with_a_table_is_loaded(tmp_path: Path) -> None:
    """As earlier versions wrote it."""
    reorder_model(co.load_checkpoint(write_model(tmp_path / "m.gguf")), tmp_path / "packed")
    expected = logits(loaded(tmp_path / "packed")[0])
    head = co.load_packed(tmp_path / "packed")["lm_head"]
    assert isinstance(head, co.PackedWeight)
    file = tmp_path / "packed" / "model.safetensors"
    save_file(
        {**load_file(file), f"{EMBED}.weight": co.dequantize(head, torch.float16)},
        file,
        metadata={"format": "pt"},
    )
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    del config["quantization_config"]["embeddings"]
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    for model in loaded(tmp_path / "packed"):
        assert type(model.get_input_embeddings()) is nn.Embedding
        assert torch.equal(logits(model), expected)


@pytest.mark.parametrize(
    ("embeddings", "message"),
    [
        ([EMBED], "embeddings is"),
        ({EMBED: 1}, "embeddings has 1 for 'model.embed_tokens'; a name is expected"),
        ({EMBED: "model.norm"}, "ties 'model.embed_tokens' to 'model.norm', which cannot be"),
        ({"model.norm": "lm_head"}, "ties 'model.norm' to 'lm_head', which cannot be"),
        (
            {EMBED: "model.layers.0.mlp.up_proj"},
            r"the packed weight is \[128, 128\]; the embedding is \[192, 128\]",
        ),
        ({EMBED: "elsewhere"}, "tensor 'model.embed_tokens.codes' is not in the model's files"),
        ({}, "the file lacks model.embed_tokens.weight"),
    ],
)
def test_a_configuration_that_ties_wrongly_is_refused(
    embeddings: Any, message: str, tmp_path: Path
) -> None:
    reorder_model(co.load_checkpoint(write_model(tmp_path / "m.gguf")), tmp_path / "packed")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    config["quantization_config"]["embeddings"] = embeddings
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")


# ---- quantize_model


def tiny(kind: str, **changes: Any) -> Any:
    config = {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 4,
        "head_dim": 16, "vocab_size": WORDS, "initializer_range": 0.3, "tie_word_embeddings": True,
        **changes,
    }  # fmt: skip
    torch.manual_seed(0)
    text = "Text" if kind == "Gemma3" else ""
    return getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}{text}Config")(**config)
    ).eval()


@pytest.mark.parametrize(("kind", "tied"), [("Llama", True), ("Llama", False), ("Gemma3", True)])
def test_a_model_packed_in_memory_is_saved(kind: str, tied: bool, tmp_path: Path) -> None:
    model = co.quantize_model(tiny(kind, tie_word_embeddings=tied), 8, 32, embeddings=True)
    assert isinstance(model.lm_head, co.MixedLinear if tied else nn.Linear)
    assert isinstance(model.get_input_embeddings(), TiedEmbedding if tied else MixedEmbedding)
    expected = logits(model)
    assert torch.equal(with_a_float_table(model), expected)
    with torch.no_grad():
        states = model.model(IDS).last_hidden_state
    model.save_pretrained(tmp_path / "saved")
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    assert ("lm_head.codes" if tied else f"{EMBED}.codes") in stored
    assert f"{EMBED}.weight" not in stored
    assert verify_packed(tmp_path / "saved").problems == []
    for again in loaded(tmp_path / "saved"):
        assert type(again.get_input_embeddings()) is type(model.get_input_embeddings())
        assert torch.equal(logits(again), expected)
    # Without the head, the embedding has the weight; it is saved under its name.
    body = transformers.AutoModel.from_pretrained(tmp_path / "saved")
    body.save_pretrained(tmp_path / "body")
    for again in (body, transformers.AutoModel.from_pretrained(tmp_path / "body")):
        assert isinstance(again.get_input_embeddings(), MixedEmbedding)
        with torch.no_grad():
            assert torch.equal(again(IDS).last_hidden_state, states)
    floats = model.dequantize()
    assert isinstance(floats.get_input_embeddings(), nn.Embedding)
    torch.testing.assert_close(logits(floats), expected, rtol=1e-5, atol=1e-4)
    floats.save_pretrained(tmp_path / "floats")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "floats")
    assert torch.equal(logits(again), logits(floats))


def test_experts_and_embeddings_are_saved_together(tmp_path: Path) -> None:
    model = tiny(
        "Qwen3Moe",
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
        norm_topk_prob=True,
    )
    co.quantize_model(model, 8, 32, embeddings=True)
    model.save_pretrained(tmp_path)
    for again in loaded(tmp_path):
        assert isinstance(again.get_input_embeddings(), TiedEmbedding)
        assert any(isinstance(module, co.nn.MixedExperts) for module in again.modules())
        assert torch.equal(logits(again), logits(model))


def test_embeddings_are_packed_on_request_alone() -> None:
    model = co.quantize_model(
        nn.ModuleDict({"a": nn.Linear(32, 8), "b": nn.Embedding(9, 32)}), 8, 32
    )
    assert isinstance(model["b"], nn.Embedding)
    table = model["b"].weight.detach().clone()
    assert isinstance(co.quantize_model(model, 8, 32, embeddings=True)["b"], MixedEmbedding)
    assert (model["b"](torch.arange(9)) - table).abs().max() < 0.02


def test_a_weight_of_several_embeddings_is_packed_once() -> None:
    first, second, head = (
        nn.Embedding(70, 32, padding_idx=2),
        nn.Embedding(70, 32),
        nn.Linear(32, 70),
    )
    second.weight = head.weight = first.weight
    model: Any = nn.ModuleDict({"first": first, "second": second, "head": head})
    co.quantize_model(model, 8, 32, embeddings=True)
    assert isinstance(model["head"], co.MixedLinear)
    assert model["first"].layer is model["second"].layer is model["head"]
    assert model["first"].padding_idx == 2
    assert sum(name.endswith("codes") for name in model.state_dict()) == 1
    alone: Any = nn.ModuleDict({"first": nn.Embedding(70, 32), "second": nn.Embedding(70, 32)})
    alone["second"].weight = alone["first"].weight
    co.quantize_model(alone, 8, 32, embeddings=True)
    assert isinstance(alone["first"], MixedEmbedding)
    assert alone["second"].layer is alone["first"]


def test_skip_leaves_a_tied_weight_by_either_name() -> None:
    for skip in ((EMBED,), ("lm_head",)):
        model = co.quantize_model(tiny("Llama"), 8, 32, skip=skip, embeddings=True)
        assert model.lm_head.weight is model.get_input_embeddings().weight


class Doubled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 2


def test_embeddings_that_compute_something_else_stay() -> None:
    model: Any = nn.ModuleDict(
        {
            "linear": nn.Linear(32, 8),
            "normed": nn.Embedding(8, 32, max_norm=1.0),
            "doubled": Doubled(8, 32),
        }
    )
    with pytest.warns(
        UserWarning,
        match=r"class Embedding computes .*: normed; .*class Doubled computes .*: doubled",
    ):
        co.quantize_model(model, 8, 32, embeddings=True)
    assert isinstance(model["doubled"], Doubled)
    with pytest.raises(ValueError, match="the model is itself a Embedding"):
        co.quantize_model(nn.Embedding(8, 32), embeddings=True)
    with pytest.raises(TypeError, match="embeddings is 1; True or False is expected"):
        co.quantize_model(model, embeddings=1)


def test_a_packed_embedding_is_not_resized() -> None:
    model = co.quantize_model(tiny("Llama", tie_word_embeddings=False), 8, 32, embeddings=True)
    with pytest.raises(
        ValueError, match=f"the embedding is packed and has {WORDS} rows; 300 are requested"
    ):
        model.resize_token_embeddings(300)
    assert model.resize_token_embeddings(WORDS) is model.get_input_embeddings()


def test_an_embedding_without_its_head_is_not_saved(tmp_path: Path) -> None:
    model = co.quantize_model(tiny("Llama"), 8, 32, embeddings=True)
    model.lm_head = nn.Linear(64, WORDS)
    with pytest.raises(
        ValueError, match=f"'{EMBED}' is tied to a layer that the model does not have"
    ):
        model.save_pretrained(tmp_path)


@pytest.mark.parametrize("offload_buffers", [True, False])
def test_rows_are_looked_up_where_the_head_is(offload_buffers: bool, tmp_path: Path) -> None:
    import_or_skip("accelerate")
    model = co.quantize_model(tiny("Llama"), 8, 32, embeddings=True)
    model.save_pretrained(tmp_path / "saved")
    places = {
        EMBED: "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "model.layers": "disk",
        "lm_head": "disk",
    }
    offloaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved",
        device_map=places,
        offload_folder=tmp_path / "offload",
        offload_buffers=offload_buffers,
    )
    assert offloaded.lm_head.codes.is_meta == offload_buffers
    assert torch.equal(logits(offloaded), logits(model))
