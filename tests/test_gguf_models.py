"""GGUF files of several architectures: to a packed directory or file, and from there to a model
of transformers.
"""

import copy
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf_model_files import MODELS, WORDS, write_model
from imports import import_or_skip
from model_directories import flip
from torch import nn
from typer.testing import CliRunner

import cutlass_ops as co
from cutlass_ops.cli import app
from cutlass_ops.files.model_directory import reorder_model
from cutlass_ops.files.packed_file import packed_info
from cutlass_ops.files.packing import reorder_checkpoint
from cutlass_ops.files.verify import verify_packed

transformers = import_or_skip("transformers")

TOKENS = torch.arange(24).view(2, 12) * 7 % 150

FACTORS = [1.0, 1.5, 2.0, 4.0, 4.5, 5.0, 6.0, 8.0]


def add_byte_level(writer: gguf.GGUFWriter) -> None:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = [*map(chr, printable), *(chr(256 + index) for index in range(len(others)))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    words = [*symbols, "ab", "\u0120ab", "<|end|>"]
    writer.add_token_list([*words, *(f"[PAD{index}]" for index in range(len(WORDS) - len(words)))])
    writer.add_token_types([1] * 258 + [3] + [5] * (len(WORDS) - 259))
    writer.add_token_merges(["a b", "\u0120 ab"])
    writer.add_eos_token_id(258)


def add_sentencepiece(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(WORDS)
    writer.add_token_scores([float(-index) for index in range(len(WORDS))])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * 7, 3])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{% for m in messages %}<|user|>{{ m.content }}{% endfor %}")


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(input_ids=TOKENS).logits.float()
    return result


def assert_same_logits(found: Any, expected: Any, tolerance: float = 5e-5) -> None:
    a, b = logits(found), logits(expected)
    assert (a - b).abs().max() <= tolerance * b.square().mean().sqrt()


def exact(path: Path) -> co.checkpoints.Checkpoint:
    """A checkpoint whose embedding is packed in fp32."""
    checkpoint = co.load_checkpoint(path)
    return replace(checkpoint, config={**checkpoint.config, "dtype": "float32"})


def mixed(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, co.MixedLinear)}


@pytest.mark.parametrize("case", MODELS)
def test_every_architecture(case: str, tmp_path: Path) -> None:
    source = tmp_path / "source" / "model.gguf"
    source.parent.mkdir()
    expected = write_model(source, case)
    checkpoint = exact(source)
    done = reorder_model(checkpoint, tmp_path / "packed")
    assert [warning[:24] for warning in done.warnings] == ["no tokenizer was written"]
    linears = {name for name, module in expected.named_modules() if isinstance(module, nn.Linear)}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "packed", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values())
    assert mixed(model) == linears
    assert_same_logits(model, expected)
    assert_same_logits(co.load_model(tmp_path / "packed", dtype=torch.float32), expected)
    assert_same_logits(co.load_model(source, dtype=torch.float32), expected)
    reorder_checkpoint(checkpoint, tmp_path / "packed.safetensors")
    assert_same_logits(
        co.load_model(tmp_path / "packed.safetensors", dtype=torch.float32), expected
    )
    assert verify_packed(tmp_path / "packed", checkpoint).problems == []


#: What transformers leaves out of the configurations that it makes of a GGUF file.
LEFT_OUT = {
    "llama linear": "rope scaling",
    "llama yarn": "rope scaling",
    "qwen3": "head_dim",
    "phi3": "sliding_window and no pad token",
    "gemma2": "soft caps and query_pre_attn_scalar",
    "gemma3": "rope scaling and query_pre_attn_scalar",
}


# which transformers does not read
@pytest.mark.parametrize("case", [case for case in MODELS if case != "gemma"])
def test_transformers_reads_the_same(case: str, tmp_path: Path) -> None:
    import_or_skip("accelerate")
    expected = write_model(tmp_path / "model.gguf", case, add_sentencepiece)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file="model.gguf",
        dtype=torch.float32,
        config=expected.config if case in LEFT_OUT else None,
    )
    assert_same_logits(theirs, expected, 1e-4)


def test_a_model_that_transformers_read_is_quantised_and_saved(tmp_path: Path) -> None:
    import_or_skip("accelerate")
    write_model(tmp_path / "model.gguf", "llama", add_sentencepiece)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    weight = model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    # as where transformers keeps the file's blocks
    weight.data, values = weight.to(torch.uint8), weight.data
    with pytest.raises(ValueError, match="the model is quantised by gguf already"):
        co.quantize_model(model, 8, 32)
    weight.data = values
    co.quantize_model(model, 8, 32)
    expected = logits(model)
    model.save_pretrained(tmp_path / "packed")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert len(mixed(loaded)) == 14
    assert torch.equal(logits(loaded), expected)


def test_a_sentencepiece_tokenizer_and_ids(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", "llama", add_sentencepiece)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "of another model"}')
    done = reorder_model(co.load_checkpoint(tmp_path / "model.gguf"), tmp_path / "packed")
    assert done.warnings == ()
    assert {"generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= set(done.copied)
    assert all((tmp_path / "packed" / name).is_file() for name in done.copied)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "packed")
    assert tokenizer("ab c").input_ids == [
        1,
        WORDS.index("▁ab"),
        WORDS.index("▁"),
        WORDS.index("c"),
    ]
    assert tokenizer.decode(tokenizer("ab c").input_ids, skip_special_tokens=True) == "ab c"
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
        == "<|user|>ab"
    )
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    expected = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "dtype": "float16",
        "eos_token_id": 2,
    }
    assert expected.items() <= config.items()
    assert config["tie_word_embeddings"] is False
    model = co.load_model(tmp_path / "packed")
    assert (model.generation_config.bos_token_id, model.generation_config.eos_token_id) == (1, 2)
    assert model.dtype == torch.float16


def test_a_byte_level_tokenizer(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", "qwen2", add_byte_level)
    assert (
        reorder_model(co.load_checkpoint(tmp_path / "model.gguf"), tmp_path / "packed").warnings
        == ()
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "packed")
    assert tokenizer("ab ab<|end|>").input_ids == [256, 257, 258]
    assert tokenizer.decode(tokenizer("ab\n 你").input_ids) == "ab\n 你"


def test_a_tokenizer_that_autotokenizer_would_change_is_reported(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", "qwen2", add_sentencepiece)
    (warning,) = reorder_model(
        co.load_checkpoint(tmp_path / "model.gguf"), tmp_path / "packed"
    ).warnings
    assert "Qwen2Tokenizer" in warning
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "packed")
    assert tokenizer("ab").input_ids == [1, WORDS.index("▁ab")]


def test_without_transformers_there_is_no_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = write_model(tmp_path / "model.gguf", "llama", add_sentencepiece)
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "transformers", None)
        done = reorder_model(exact(tmp_path / "model.gguf"), tmp_path / "packed")
    assert re.match("no tokenizer was written: ModuleNotFoundError", done.warnings[0])
    assert done.copied == ("generation_config.json",)
    assert_same_logits(co.load_model(tmp_path / "packed", dtype=torch.float32), expected)


def test_the_command_line_tells_of_a_missing_tokenizer(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", "llama")
    arguments = ["reorder", str(tmp_path / "model.gguf"), "-o", str(tmp_path / "packed")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "warning  no tokenizer was written" in result.output
    again = CliRunner().invoke(app, [*arguments, "--json"])
    assert json.loads(again.stdout)["warnings"][0].startswith("no tokenizer")
    assert json.loads(again.stdout)["found"] == 1


def test_divisors_of_rotary_frequencies(tmp_path: Path) -> None:
    """llama 3.1's files store the divisors as a tensor, which transformers' reader ignores."""
    rope = {
        "rope_type": "longrope", "rope_theta": 20000.0, "short_factor": FACTORS,
        "long_factor": FACTORS,
        "attention_factor": 1.0, "original_max_position_embeddings": 128, "factor": 1.0,
    }  # fmt: skip
    expected = write_model(tmp_path / "model.gguf", "llama", extra={"rope_freqs.weight": FACTORS})
    plain = logits(expected)
    config = copy.deepcopy(expected.config)
    config.rope_parameters = rope
    scaled = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    scaled.load_state_dict(expected.state_dict())
    assert torch.allclose(
        scaled.model.rotary_emb.inv_freq * torch.tensor(FACTORS), expected.model.rotary_emb.inv_freq
    )
    assert (logits(scaled) - plain).abs().max() > 0.1
    checkpoint = exact(tmp_path / "model.gguf")
    reorder_model(checkpoint, tmp_path / "packed")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "packed", dtype=torch.float32
    )
    assert_same_logits(model, scaled)
    assert_same_logits(co.load_model(tmp_path / "model.gguf", dtype=torch.float32), scaled)
    assert verify_packed(tmp_path / "packed", checkpoint).problems == []


def test_long_and_short_divisors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.25}
    monkeypatch.setitem(MODELS, "phi3", ("Phi3Config", {}, keys))
    long = [2 * factor for factor in FACTORS]
    extra = {"rope_factors_short.weight": FACTORS, "rope_factors_long.weight": long}
    write_model(tmp_path / "model.gguf", "phi3", extra=extra)
    config = co.load_checkpoint(tmp_path / "model.gguf").config
    rope = {
        "rope_type": "longrope",
        "short_factor": FACTORS,
        "long_factor": long,
        "attention_factor": 1.25,
    }
    assert rope.items() <= config["rope_parameters"].items()
    assert config["rope_parameters"]["original_max_position_embeddings"] == 64
    reorder_model(co.load_checkpoint(tmp_path / "model.gguf"), tmp_path / "packed")
    rotary = co.load_model(tmp_path / "packed", dtype=torch.float32).model.rotary_emb
    assert rotary.attention_scaling == 1.25
    assert torch.allclose(
        rotary.inv_freq, 10000.0 ** -(torch.arange(8) / 8) / torch.tensor(FACTORS)
    )


def write_small(
    path: Path, architecture: str, tensors: dict[str, tuple[int, ...]], **keys: int
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    common = {
        "block_count": 1,
        "context_length": 8,
        "embedding_length": 32,
        "feed_forward_length": 32,
    }
    for key, value in {**common, "attention.head_count": 2, **keys}.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    for name, shape in {
        "token_embd.weight": (64, 32),
        "blk.0.attn_v.weight": (32, 32),
        **tensors,
    }.items():
        data = np.ones(shape, np.float32)
        quantised = len(shape) > 1
        kind = Type.Q8_0 if quantised else Type.F32
        writer.add_tensor(
            name, gguf.quants.quantize(data, kind) if quantised else data, raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", ["gpt2", "mamba", "t5", "qwen3moe", "other"])
def test_an_architecture_that_is_not_supported_is_refused_when_it_is_reordered(
    architecture: str, tmp_path: Path
) -> None:
    checkpoint = co.load_checkpoint(write_small(tmp_path / "m.gguf", architecture, {}))
    assert "blk.0.attn_v" in checkpoint
    assert checkpoint.metadata["general.architecture"] == architecture
    match = (
        f"cannot become a model directory: architecture '{architecture}' is not supported; "
        "supported are llama, "
    )
    with pytest.raises(co.CheckpointError, match=match):
        reorder_model(checkpoint, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()
    # A file is only a container of tensors.
    reorder_checkpoint(checkpoint, tmp_path / "packed.safetensors")
    with pytest.raises(co.CheckpointError, match="there is no config"):
        co.load_model(tmp_path / "packed.safetensors")
    with pytest.raises(
        co.CheckpointError,
        match=f"architecture '{architecture}' is not supported.*config can be given",
    ):
        co.load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("tensors", "keys", "problem"),
    [
        (
            {"blk.0.ffn_gate_exps.weight": (2, 32, 32)},
            {},
            "'blk.0.ffn_gate_exps.weight' belongs to a mixture of experts",
        ),
        ({"blk.0.what.weight": (32,)}, {}, "'blk.0.what.weight' has no place"),
        ({"rope_freqs.weight": (7,)}, {}, r"rope_freqs.weight: \[7\] values; 8 are expected"),
        ({}, {"block_count": 0}, "llama.block_count is 0; a count of at least 1"),
        (
            {},
            {"block_count": 2**31 - 1},
            "llama.block_count is 2147483647; the file has tensors of 1 layers",
        ),
        ({}, {"rope.dimension_count": 8}, "llama.rope.dimension_count is 8; 16"),
    ],
)
def test_a_model_that_transformers_could_not_load_is_refused(
    tensors: dict[str, tuple[int, ...]], keys: dict[str, int], problem: str, tmp_path: Path
) -> None:
    checkpoint = co.load_checkpoint(write_small(tmp_path / "m.gguf", "llama", tensors, **keys))
    with pytest.raises(co.CheckpointError, match=problem):
        reorder_model(checkpoint, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_a_table_beside_a_packed_head_is_compared_and_counted_once(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", "llama tied")
    checkpoint, out = co.load_checkpoint(tmp_path / "model.gguf"), tmp_path / "packed"
    # A model that is not known may do anything with its embedding.
    checkpoint = replace(checkpoint, config={**checkpoint.config, "model_type": "another"})
    seen: list[tuple[str, int]] = []
    reorder_model(checkpoint, out, progress=lambda *args: seen.append(args))
    assert sum(nbytes for _, nbytes in seen[1:]) == sum(
        entry.nbytes for entry in checkpoint.entries.values()
    )
    assert dict(seen)["lm_head"] == checkpoint.entries["lm_head"].nbytes
    assert dict(seen)["model.embed_tokens.weight"] == 0
    assert verify_packed(out, checkpoint).problems == []
    flip(out / "model.safetensors", "model.embed_tokens.weight")
    assert verify_packed(out, checkpoint).problems == [
        "model.embed_tokens.weight: the tensor does not have its checksum",
        "model.embed_tokens.weight: differs from the checkpoint's",
    ]


def test_an_interrupted_run_is_taken_up(tmp_path: Path) -> None:
    expected = write_model(tmp_path / "model.gguf", "llama", add_sentencepiece)
    checkpoint = exact(tmp_path / "model.gguf")
    seen: list[str] = []

    def stop(name: str, nbytes: int) -> None:
        seen.append(name)
        if len(seen) == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reorder_model(checkpoint, tmp_path / "packed", shard_bytes=30_000, progress=stop)
    assert not (tmp_path / "packed" / "config.json").exists()
    done = reorder_model(checkpoint, tmp_path / "packed", shard_bytes=30_000)
    assert 0 < done.found < len(done.files)
    assert_same_logits(co.load_model(tmp_path / "packed", dtype=torch.float32), expected)
    (tmp_path / "model.gguf").unlink()
    write_model(tmp_path / "model.gguf", "llama tied", add_sentencepiece)
    with pytest.raises(ValueError, match="is of another checkpoint"):
        reorder_model(exact(tmp_path / "model.gguf"), tmp_path / "packed", shard_bytes=30_000)


def test_a_config_beside_a_packed_file_goes_first(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", "llama")
    reorder_checkpoint(co.load_checkpoint(tmp_path / "model.gguf"), tmp_path / "packed.safetensors")
    config = {**packed_info(tmp_path / "packed.safetensors").config, "rms_norm_eps": 0.25}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert co.load_model(tmp_path / "packed.safetensors").config.rms_norm_eps == 0.25
    (tmp_path / "config.json").unlink()
    assert co.load_model(tmp_path / "packed.safetensors").config.rms_norm_eps == np.float32(1e-6)


def write_gemma(path: Path, half: bool) -> Path:
    """A Gemma 3 whose residual stream exceeds fp16, its embedding in F16 or F32."""
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(32)
    writer.add_layer_norm_rms_eps(1e-6)
    random = np.random.default_rng(0)
    writer.add_tensor(
        "token_embd.weight",
        random.standard_normal((96, 64)).astype(np.float16 if half else np.float32),
    )
    norms = dict.fromkeys(
        ("attn_norm", "post_attention_norm", "ffn_norm", "attn_q_norm", "attn_k_norm"), 1.0
    )
    for name, value in (norms | {"post_ffw_norm": 3e4}).items():
        writer.add_tensor(
            f"blk.0.{name}.weight",
            np.full(32 if name.endswith(("q_norm", "k_norm")) else 64, value, np.float32),
        )
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    rows = {"attn_k": 32, "attn_v": 32}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        values = random.standard_normal((rows.get(name, 64), 64)).astype(np.float32)
        writer.add_tensor(
            f"blk.0.{name}.weight", gguf.quants.quantize(values, Type.Q8_0), raw_dtype=Type.Q8_0
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("half", [False, True])
def test_a_model_that_exceeds_fp16_is_bf16_whatever_its_embedding_is(
    half: bool, tmp_path: Path
) -> None:
    path = write_gemma(tmp_path / "model.gguf", half)
    assert co.load_checkpoint(path).config["dtype"] == "bfloat16"
    model = co.load_model(path)
    assert model.dtype == torch.bfloat16
    assert bool(model(TOKENS % 96).logits.isfinite().all())


def test_fp16_of_a_model_that_exceeds_it_is_warned_of(tmp_path: Path) -> None:
    path = write_gemma(tmp_path / "model.gguf", True)
    reorder_model(co.load_checkpoint(path), tmp_path / "packed")
    for source in (path, tmp_path / "packed"):
        with pytest.warns(UserWarning, match="Gemma3ForCausalLM exceeds the range of float16"):
            co.load_model(source, dtype=torch.float16)


def test_fp16_in_the_configuration_of_a_model_beyond_its_range_becomes_bf16(tmp_path: Path) -> None:
    checkpoint = co.load_checkpoint(write_gemma(tmp_path / "model.gguf", True))
    stated = replace(checkpoint, config={**checkpoint.config, "dtype": "float16"})
    reorder_model(stated, tmp_path / "packed")
    assert json.loads((tmp_path / "packed" / "config.json").read_text())["dtype"] == "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps(stated.config))
    reorder_checkpoint(stated, tmp_path / "p.safetensors")
    config = transformers.AutoConfig.for_model(**stated.config)
    assert co.load_model(tmp_path / "p.safetensors", config=config).dtype == torch.bfloat16
