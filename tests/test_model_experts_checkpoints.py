"""Models with packed experts made of checkpoints, and trained."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_models import FAMILIES, TOKENS, assert_same_experts, changed, experts_of, logits, tiny
from hf_models import DIALECTS, Written
from imports import import_or_skip
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

import cutlass_ops as co
from cutlass_ops.cli import app
from cutlass_ops.files.conversion_plan import Options
from cutlass_ops.files.model_directory import reorder_model
from cutlass_ops.files.packing import reorder_checkpoint
from cutlass_ops.files.verify import diff_packed, verify_packed

transformers = import_or_skip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

# ---- made of checkpoints


def fp8(weight: Tensor) -> Written:
    scale = weight.abs().amax() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale.view(1, 1)}, codes.float() * scale


PER_EXPERT: dict[str, Any] = {
    **DIALECTS,
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
}


def written(
    dialect: str, folder: Path, family: str = "Qwen3Moe", **options: Any
) -> tuple[Path, Any]:
    """A checkpoint of which a dialect quantised all linear layers but the routers, and the
    model of its values.
    """
    write, quantization = PER_EXPERT[dialect]
    tiny(family, **options).save_pretrained(folder / "values")
    values = load_file(folder / "values" / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    for name, value in values.items():
        module = name.removesuffix(".weight")
        if value.dim() == 2 and not module.endswith(("lm_head", "embed_tokens", "gate")):
            parts, values[name] = write(value)
            tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        else:
            tensors[name] = value
    save_file(values, folder / "values" / "model.safetensors", metadata={"format": "pt"})
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder / "values")
    (folder / "source").mkdir()
    save_file(tensors, folder / "source" / "model.safetensors", metadata={"format": "pt"})
    config = {**expected.config.to_dict(), "quantization_config": quantization}
    (folder / "source" / "config.json").write_text(json.dumps(config))
    return folder / "source", expected


def assert_same_logits(found: Any, expected: Any) -> None:
    y = logits(expected)
    assert (logits(found) - y).abs().max() <= 2e-5 * y.square().mean().sqrt()


@pytest.mark.parametrize("dialect", PER_EXPERT)
def test_experts_of_every_dialect_keep_their_codes(dialect: str, tmp_path: Path) -> None:
    source, expected = written(dialect, tmp_path, moe_intermediate_size=64)
    checkpoint = co.load_checkpoint(source)
    reorder_model(checkpoint, tmp_path / "packed")
    reorder_checkpoint(checkpoint, tmp_path / "packed.safetensors")
    loaded_models = [
        co.load_model(path, dtype=torch.float32)
        for path in (source, tmp_path / "packed", tmp_path / "packed.safetensors")
    ]
    loaded_models.append(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    )
    for model in loaded_models:
        assert experts_of(model).keys() == set(FAMILIES["Qwen3Moe"][1])
        assert_same_logits(model, expected)
    for name, layer in experts_of(loaded_models[0]).items():
        for e in range(4):
            gate, up, down = (
                checkpoint[f"{name}.{e}.{part}_proj"] for part in ("gate", "up", "down")
            )
            for found, given in (
                (layer.gate_up_proj.packed, (gate, up)),
                (layer.down_proj.packed, (down,)),
            ):
                weight = found.unpack_expert(e)
                assert torch.equal(weight.codes, torch.cat([w.codes for w in given]))
                assert torch.equal(weight.scales, torch.cat([w.scales for w in given]))
    for path in (tmp_path / "packed", tmp_path / "packed.safetensors"):
        found = verify_packed(path, checkpoint)
        assert found.problems == []
        assert found.largest_difference is not None
        assert found.largest_difference <= 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_float_experts_are_quantised(family: str, tmp_path: Path) -> None:
    """The same as quantize_model makes, from matrices of each expert and from stacks."""
    model = tiny(family)
    model.save_pretrained(tmp_path / "float")
    checkpoint = co.load_checkpoint(tmp_path / "float")
    done = reorder_model(checkpoint, tmp_path / "packed", Options(4, 32, False))
    reorder_checkpoint(
        checkpoint, tmp_path / "packed.safetensors", bits=4, group_size=32, symmetric=False
    )
    names = {
        f"{name}.{product}"
        for name in FAMILIES[family][1]
        for product in ("gate_up_proj", "down_proj")
    }
    assert names <= done.weights.keys()
    # of a model that was saved, too
    exact = copy.deepcopy(co.quantize_model(model, 4, 32)).dequantize()
    for loaded in (
        co.load_model(tmp_path / "float", options=Options(4, 32, False), fuse=False),
        co.load_model(tmp_path / "packed.safetensors", fuse=False),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed"),
    ):
        assert_same_experts(loaded, model)
        assert torch.equal(logits(loaded), logits(model))
        assert_same_logits(loaded, exact)
    for path in (tmp_path / "packed", tmp_path / "packed.safetensors"):
        found = verify_packed(path, checkpoint)
        assert found.problems == []
        assert found.largest_difference is not None
        assert 0.001 < found.largest_difference < 0.2
    loaded.save_pretrained(tmp_path / "again")
    assert diff_packed(tmp_path / "packed", tmp_path / "again").changed == {}


def test_experts_as_earlier_versions_wrote_them_are_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file each was packed, in a directory they were floats; models have their values."""
    source, expected = written("compressed-tensors", tmp_path, moe_intermediate_size=64)
    checkpoint = co.load_checkpoint(source)
    with monkeypatch.context() as patch:
        patch.setattr("cutlass_ops.files.conversion_plan.layers_of", lambda *_: [])
        reorder_checkpoint(checkpoint, tmp_path / "old.safetensors")
        reorder_model(checkpoint, tmp_path / "old")
    assert isinstance(
        co.load_packed(tmp_path / "old.safetensors")["model.layers.0.mlp.experts.3.up_proj"],
        co.PackedWeight,
    )
    for path in (tmp_path / "old.safetensors", tmp_path / "old"):
        model = co.load_model(path, dtype=torch.float32)
        assert not experts_of(model)
        assert_same_logits(model, expected)
        assert verify_packed(path, checkpoint).problems == []


def test_experts_in_small_shards_and_on_the_disk(tmp_path: Path) -> None:
    tiny("Qwen3Moe").save_pretrained(tmp_path / "float")
    done = reorder_model(
        co.load_checkpoint(tmp_path / "float"),
        tmp_path / "packed",
        Options(4, 32),
        shard_bytes=30_000,
    )
    assert len(done.files) > 4
    names = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", "model.layers.0")
    places = {**dict.fromkeys(names, "cpu"), "model.layers.1": "disk"}
    options = {
        "device_map": places,
        "offload_folder": tmp_path / "offload",
        "offload_buffers": True,
    }
    offloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed", **options)
    assert experts_of(offloaded)["model.layers.1.mlp.experts"].down_proj.codes.is_meta
    assert torch.equal(logits(offloaded), logits(co.load_model(tmp_path / "packed", fuse=False)))


def mxfp4(stack: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks and scales of a stack ``[E, K, N]``, and its values."""
    quantized = [
        co.quantize(matrix.t().contiguous(), book="mxfp4", group_size=32) for matrix in stack
    ]
    codes = torch.stack([weight.codes for weight in quantized])
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).unflatten(-1, (-1, 16))
    scales = torch.stack(
        [weight.scales.float().log2().round().to(torch.int32) + 127 for weight in quantized]
    )
    values = torch.stack([co.dequantize(weight, torch.float32).t() for weight in quantized])
    return blocks, scales.to(torch.uint8), values


def test_stacked_mxfp4_experts_of_gpt_oss_keep_their_codes(tmp_path: Path) -> None:
    expected = tiny("GptOss", intermediate_size=64)
    tensors = {name: tensor.clone() for name, tensor in expected.state_dict().items()}
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                del tensors[name]
                tensors[f"{name}_blocks"], tensors[f"{name}_scales"], values = mxfp4(parameter)
                parameter.copy_(values)
    source = tmp_path / "source"
    source.mkdir()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    config = {**expected.config.to_dict(), "quantization_config": {"quant_method": "mxfp4"}}
    (source / "config.json").write_text(json.dumps(config))
    checkpoint = co.load_checkpoint(source)
    reorder_model(checkpoint, tmp_path / "packed")
    reorder_checkpoint(checkpoint, tmp_path / "packed.safetensors")
    for path in (source, tmp_path / "packed", tmp_path / "packed.safetensors"):
        model = co.load_model(path, dtype=torch.float32)
        assert experts_of(model).keys() == set(FAMILIES["GptOss"][1])
        assert_same_logits(model, expected)
        weight = experts_of(model)["model.layers.1.mlp.experts"].gate_up_proj.packed.unpack_expert(
            2
        )
        blocks = tensors["model.layers.1.mlp.experts.gate_up_proj_blocks"][2].flatten(1)
        stored = torch.stack([blocks & 15, blocks >> 4], -1).flatten(1)
        assert torch.equal(weight.codes, torch.cat([stored[::2], stored[1::2]]))
        bias = tensors["model.layers.1.mlp.experts.gate_up_proj_bias"][2]
        assert weight.bias is not None
        assert torch.equal(weight.bias, torch.cat([bias[::2], bias[1::2]]))
    for path in (tmp_path / "packed", tmp_path / "packed.safetensors"):
        found = verify_packed(path, checkpoint)
        assert (found.problems, found.largest_difference) == ([], 0)
    (source / "config.json").write_text(json.dumps({**config, "num_local_experts": 5}))
    done = plan_of(source, bits=8, group_size=32)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert f"{name} is [4, 64, 128]; [5, 64, 128] is expected" in done.kept[name]
    (source / "config.json").write_text(json.dumps(config))
    # Left out, they are tensors of their values.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = co.load_model(
            source, dtype=torch.float32, options=Options(bits=8, group_size=32, exclude="experts")
        )
    assert not experts_of(plain)
    assert torch.equal(
        plain.model.layers[1].mlp.experts.down_proj, expected.model.layers[1].mlp.experts.down_proj
    )


def test_biases_that_do_not_fit_leave_experts_plain(tmp_path: Path) -> None:
    tiny("GptOss").save_pretrained(tmp_path / "float")
    tensors = load_file(tmp_path / "float" / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors[f"{name}_bias"] = tensors[f"{name}_bias"][:, :-1].contiguous()
    save_file(tensors, tmp_path / "float" / "model.safetensors", metadata={"format": "pt"})
    done = plan_of(tmp_path / "float", bits=4, group_size=32)
    assert "gate_up_proj_bias is F32 [4, 191]; floats [4, 192] are expected" in done.kept[name]
    model = co.quantize_model(tiny("GptOss"), 4, 32)
    model.save_pretrained(tmp_path / "packed")
    changed(tmp_path / "packed", lambda modules: modules[name]["tensors"].pop("bias"))
    with pytest.raises(
        ValueError, match="gate_up_proj is said to have no biases; the model's experts have biases"
    ):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")


def test_experts_that_differ_from_their_checkpoint_are_found(tmp_path: Path) -> None:
    tiny("Qwen3Moe").save_pretrained(tmp_path / "float")
    reorder_model(co.load_checkpoint(tmp_path / "float"), tmp_path / "packed", Options(4, 32))
    tensors = load_file(tmp_path / "float" / "model.safetensors")
    tensors["model.layers.1.mlp.experts.2.up_proj.weight"][3, 4] += 1
    save_file(tensors, tmp_path / "float" / "model.safetensors", metadata={"format": "pt"})
    problems = verify_packed(tmp_path / "packed", co.load_checkpoint(tmp_path / "float")).problems
    assert problems
    assert all(
        problem.startswith("model.layers.1.mlp.experts.gate_up_proj[2]: ") for problem in problems
    )
    config = json.loads((tmp_path / "float" / "config.json").read_text())
    (tmp_path / "float" / "config.json").write_text(json.dumps({**config, "num_experts": 3}))
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, tmp_path / "float" / "model.safetensors", metadata={"format": "pt"})
    problems = verify_packed(tmp_path / "packed", co.load_checkpoint(tmp_path / "float")).problems
    assert any("experts" in problem for problem in problems)


def plan_of(path: Path, **options: Any) -> Any:
    return reorder_model(
        co.load_checkpoint(path), path.parent / "nothing", Options(**options), dry_run=True
    )


def test_experts_stay_plain_where_they_cannot_be_one_weight(tmp_path: Path) -> None:
    """Each with the reason: a part of them is excluded, or quantised otherwise; quantised ones
    become their values.
    """
    source, expected = written("compressed-tensors int8", tmp_path)
    name = "model.layers.1.mlp.experts"
    done = plan_of(source, exclude=r"layers\.1.*experts\.2\.up_proj")
    assert f"{name}.0.gate_proj.weight" in done.tensors
    assert "others of its layer's experts are not to be packed" in done.kept[f"{name}.0.gate_proj"]
    assert "model.layers.0.mlp.experts.down_proj" in done.weights
    tensors = load_file(source / "model.safetensors")
    scales = tensors.pop(f"{name}.2.up_proj.weight_scale")
    tensors[f"{name}.2.up_proj.weight"] = tensors[f"{name}.2.up_proj.weight"].float() * scales
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    done = plan_of(source)
    assert "others of its layer's experts are not to be packed" in done.kept[f"{name}.0.gate_proj"]
    done = plan_of(source, bits=8, group_size=32)
    assert "the formats of gate_up_proj differ between experts" in done.kept[f"{name}.2.up_proj"]
    model = co.load_model(source, dtype=torch.float32)
    assert experts_of(model).keys() == {"model.layers.0.mlp.experts"}
    assert_same_logits(model, expected)
    del tensors[f"{name}.2.up_proj.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    done = plan_of(source)
    assert (
        "7 tensors of gate_up_proj are there, which are not those of 4 experts"
        in done.kept[f"{name}.2.gate_proj"]
    )


def test_an_expert_that_is_there_twice_or_of_another_size_leaves_its_layer_plain(
    tmp_path: Path,
) -> None:
    tiny("Qwen3Moe").save_pretrained(tmp_path / "float")
    tensors = load_file(tmp_path / "float" / "model.safetensors")
    name = "model.layers.0.mlp.experts"
    twice = {**tensors, f"{name}.01.up_proj.weight": tensors[f"{name}.1.up_proj.weight"].clone()}
    other = {
        **tensors,
        f"{name}.1.up_proj.weight": tensors[f"{name}.1.up_proj.weight"][:32].clone(),
    }
    for changes, reason in (
        (twice, "9 tensors of gate_up_proj are there"),
        (other, "up_proj.weight is [32, 64]; [40, 64] is expected"),
    ):
        save_file(changes, tmp_path / "float" / "model.safetensors", metadata={"format": "pt"})
        done = plan_of(tmp_path / "float", bits=4, group_size=32)
        assert reason in done.kept[f"{name}.1.up_proj"]
        assert "model.layers.1.mlp.experts.gate_up_proj" in done.weights


def test_act_orders_of_gate_and_up_that_differ_are_refused(tmp_path: Path) -> None:
    source, _ = written("gptq", tmp_path, moe_intermediate_size=64)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.experts.1.up_proj.g_idx"] = torch.arange(64, dtype=torch.int32) % 2
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    name = (
        r"'model\.layers\.0\.mlp\.experts\.gate_up_proj': expert 1: .* \(perm\) differ; .* leave "
        r"them out \(--exclude\)"
    )
    with pytest.raises(co.CheckpointError, match=name):
        co.load_model(source)
    loaded = co.load_model(source, options=Options(exclude=r"layers\.0\.mlp\.experts"))
    assert experts_of(loaded).keys() == {"model.layers.1.mlp.experts"}


def test_experts_are_split_over_ranks(tmp_path: Path) -> None:
    """Gate and up by their features, each by itself; down by its columns."""
    tiny("Qwen3Moe", moe_intermediate_size=192).save_pretrained(tmp_path / "float")
    checkpoint = co.load_checkpoint(tmp_path / "float")
    reorder_model(checkpoint, tmp_path / "whole", Options(4, 32))
    reorder_model(checkpoint, tmp_path / "ranks", Options(4, 32), ranks=2)
    assert verify_packed(tmp_path / "ranks", checkpoint).problems == []
    name = "model.layers.0.mlp.experts"
    whole = co.load_packed(tmp_path / "whole")
    for rank in range(2):
        part = co.load_packed(tmp_path / "ranks" / f"rank-{rank}-of-2")
        for e in range(4):
            rows = slice(96 * rank, 96 * rank + 96)
            gate_up, down = (
                whole[f"{name}.{product}"].unpack()[e] for product in ("gate_up_proj", "down_proj")
            )
            found = [
                part[f"{name}.{product}"].unpack()[e] for product in ("gate_up_proj", "down_proj")
            ]
            assert torch.equal(
                found[0].codes, torch.cat([half[rows] for half in gate_up.codes.chunk(2)])
            )
            assert torch.equal(found[1].codes, down.codes[:, rows])


def test_the_command_line_knows_experts(tmp_path: Path) -> None:
    tiny("Qwen3Moe").save_pretrained(tmp_path / "float")

    def run(*arguments: str) -> Any:
        done = CliRunner().invoke(app, [*arguments, "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.output)

    source, packed = str(tmp_path / "float"), str(tmp_path / "packed")
    done = run("reorder", source, "-o", packed, "--bits", "4", "--group-size", "32")
    gate_up = "model.layers.0.mlp.experts.gate_up_proj"
    assert done["weights"][gate_up] == {"n": 4 * 128, "k": 64, "bits": 4, "group_size": 32}
    assert run("verify", packed, "--against", source)["ok"]
    found = {tensor["name"]: tensor for tensor in run("inspect", packed)["tensors"]}
    assert found[gate_up]["shape"] == [4, 80, 64]
    assert run("diff", packed, packed)["changed"] == {}


# ---- trained


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_around_packed_experts_are_trained(family: str) -> None:
    """Gradients are those of the dequantised model, the loss falls, and the packed tensors stay."""
    peft = import_or_skip("peft")
    model = co.quantize_model(tiny(family), 4, 32)
    exact = copy.deepcopy(model).dequantize()
    target = ["q_b_proj", "o_proj"] if family == "DeepseekV3" else ["q_proj", "o_proj"]
    losses = []
    for part in (model, exact):
        torch.manual_seed(1)
        trained = peft.get_peft_model(
            part, peft.LoraConfig(r=4, target_modules=target, init_lora_weights=False)
        )
        loss = trained(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        losses.append((trained, loss))
    (trained, loss), (other, expected) = losses
    assert abs(loss.item() - expected.item()) <= 1e-5 * expected.item()
    gradients = {name: p.grad for name, p in trained.named_parameters() if p.requires_grad}
    assert len(gradients) == 8
    for name, p in other.named_parameters():
        if p.requires_grad:
            error = (gradients[name] - p.grad).norm() / p.grad.norm()
            assert error <= 1e-4, name
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], 0.02)
    first = loss.item()
    for _ in range(12):
        optimizer.zero_grad()
        loss = trained(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.9 * first
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_buffers())


@pytest.mark.parametrize(
    "options",
    [
        {"target_parameters": ["mlp.experts.gate_up_proj"]},
        {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]},
        {"target_modules": ["gate_up_proj"]},
        {"target_modules": ["experts"]},
        {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
        {"target_modules": "all-linear"},
    ],
)
def test_adapters_of_packed_experts_are_refused(options: dict[str, Any]) -> None:
    peft = import_or_skip("peft")
    model = co.quantize_model(tiny("Qwen3Moe"), 4, 32)
    with pytest.raises(
        ValueError, match=r"of packed experts, .*name other layers in target_modules, as \['q_proj'"
    ):
        peft.get_peft_model(model, peft.LoraConfig(r=2, **options))


def test_adapters_of_float_experts_beside_packed_layers() -> None:
    """As the refusal says."""
    peft = import_or_skip("peft")
    model = co.quantize_model(tiny("Qwen3Moe"), 4, 32, skip=("lm_head", "experts"))
    trained = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_parameters=["mlp.experts.gate_up_proj"])
    )
    assert any("experts" in name and p.requires_grad for name, p in trained.named_parameters())
    trained(input_ids=TOKENS, labels=TOKENS).loss.backward()
