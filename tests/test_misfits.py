"""What reorder writes can be loaded: tensors that a model has no place for, that it lacks, and
that nothing uses.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from imports import import_or_skip
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import cutlass_ops as co
from cutlass_ops.cli import app
from cutlass_ops.files.conversion_plan import Options
from cutlass_ops.files.model_directory import reorder_model
from cutlass_ops.files.verify import verify_packed
from cutlass_ops.nn.architecture import Architecture

# transformers' own parts warn of each other.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = import_or_skip("transformers")

OPTIONS = Options(bits=8, group_size=32)
WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
SETTINGS = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    "ignore": ["lm_head"],
}


def save(path: Path, quantised: bool = False) -> tuple[Any, dict[str, torch.Tensor]]:
    """A llama of one layer, in floats or compressed-tensors' int8; the model of its values,
    and its tensors.
    """
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=96,
        architectures=["LlamaForCausalLM"], dtype="float32",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    for name, layer in model.named_modules():
        if quantised and isinstance(layer, torch.nn.Linear) and name != "lm_head":
            scales = layer.weight.detach().abs().amax(1, keepdim=True) / 127
            codes = (layer.weight.detach() / scales).round()
            layer.weight.data = codes * scales
            tensors |= {f"{name}.weight": codes.to(torch.int8), f"{name}.weight_scale": scales}
    path.mkdir()
    fields = {"quantization_config": SETTINGS} if quantised else {}
    (path / "config.json").write_text(json.dumps({**config.to_dict(), **fields}))
    save_file(tensors, path / "model.safetensors")
    return model, tensors


def change(path: Path, **changes: torch.Tensor | None) -> co.checkpoints.Checkpoint:
    tensors = {**load_file(path / "model.safetensors"), **changes}
    save_file(
        {name: value for name, value in tensors.items() if value is not None},
        path / "model.safetensors",
    )
    return co.load_checkpoint(path)


def test_a_tensor_without_a_module_is_refused_when_packing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "m")
    checkpoint = change(tmp_path / "m", **{"model.layers.0.self_attn.extra": torch.ones(3)})
    match = r"LlamaForCausalLM, its model, has no place for model\.layers\.0\.self_attn\.extra"
    with pytest.raises(co.CheckpointError, match=match):
        reorder_model(checkpoint, tmp_path / "packed", OPTIONS)
    assert not (tmp_path / "packed").exists()
    with monkeypatch.context() as context:  # as an older version packed it
        context.setattr(Architecture, "misfits", lambda *_: ([], []))
        reorder_model(checkpoint, tmp_path / "packed", OPTIONS)
    assert any(
        match.replace("\\", "") in problem
        for problem in verify_packed(tmp_path / "packed", checkpoint).problems
    )


def test_a_part_of_a_model_is_refused_when_packing(tmp_path: Path) -> None:
    save(tmp_path / "m")
    checkpoint = change(
        tmp_path / "m", **{"model.norm.weight": None, "model.layers.0.mlp.up_proj.weight": None}
    )
    with pytest.raises(
        co.CheckpointError,
        match=r"lacks model\.layers\.0\.mlp\.up_proj\.weight, model\.norm\.weight of Llama",
    ):
        reorder_model(checkpoint, tmp_path / "packed", OPTIONS)


def test_tensors_that_transformers_ignores_are_no_misfits(tmp_path: Path) -> None:
    model, _ = save(tmp_path / "m")
    checkpoint = change(
        tmp_path / "m", **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    )
    reorder_model(checkpoint, tmp_path / "packed", OPTIONS)
    ids = torch.arange(8)[None]
    assert torch.allclose(
        co.load_model(tmp_path / "packed")(ids).logits, model(ids).logits, atol=0.05
    )


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.k_proj.k_scale",
        "model.layers.0.self_attn.attn.v_scale",
        "model.layers.0.self_attn.v_zero_point",
        "model.layers.0.self_attn.kv_scale",
    ],
)
def test_scales_of_a_kv_cache_are_left_out_with_a_note(name: str, tmp_path: Path) -> None:
    model, _ = save(tmp_path / "m", quantised=True)
    checkpoint = change(tmp_path / "m", **{name: torch.tensor([0.05])})
    said = f"1 scales of a quantised KV cache ({name}, ...) are not used"
    done = reorder_model(checkpoint, tmp_path / "packed")
    assert said in done.warnings[0]
    assert said in CliRunner().invoke(app, ["inspect", str(tmp_path / "m"), "--json"]).output
    found = verify_packed(tmp_path / "packed", checkpoint)
    assert found.problems == []
    assert said in found.notes[0]
    ids = torch.arange(8)[None]
    with pytest.warns(UserWarning, match="scales of a quantised KV cache"):
        loaded = co.load_model(tmp_path / "m")
    for other in (loaded, co.load_model(tmp_path / "packed")):
        assert torch.allclose(other(ids).logits, model(ids).logits, atol=1e-4)


@pytest.mark.parametrize(
    ("part", "codes"),
    [
        ("weight", torch.ones(64, 64).to(torch.float8_e4m3fn)),
        ("qweight", torch.ones(8, 64, dtype=torch.int32)),
        ("weight_packed", torch.ones(64, 32, dtype=torch.uint8)),
        ("W_q", torch.ones(32, 64, dtype=torch.uint8)),
        ("_weight_qdata", torch.ones(64, 64, dtype=torch.int8)),
        ("weight_blocks", torch.ones(64, 2, 16, dtype=torch.uint8)),
    ],
)
def test_codes_of_another_format_are_refused(
    part: str, codes: torch.Tensor, tmp_path: Path
) -> None:
    tensors = {
        "m.qweight": torch.ones(8, 64),
        "m.qzeros": torch.ones(2, 8),
        "m.scales": torch.ones(2, 64),
    }
    tensors = {
        name: value if name == "m.scales" else value.int() for name, value in tensors.items()
    }
    save_file(
        {**tensors, f"n.{part}": codes, "n.weight_scale": torch.ones(64, 1)},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}})
    )
    if part == "qweight":  # GPTQ's own
        with pytest.raises(co.CheckpointError, match=r"'n\.qzeros': is missing"):
            co.load_checkpoint(tmp_path)
        return
    checkpoint = co.load_checkpoint(tmp_path)
    assert list(checkpoint) == ["m"]
    with pytest.raises(
        co.CheckpointError, match=rf"'n\.{part}': is .*: codes of another format than gptq"
    ):
        reorder_model(checkpoint, tmp_path / "packed")
