"""The plugin in SGLang's engine on a CPU: tiny models give the tokens of their dequantised weights
in the same engine.

Needs SGLang in a separate environment, as it requires other versions. Its kernels are not published
for CPUs: where they are missing, a module of that name lets SGLang import them, and raises if one
is called. One process runs all engines, each with its own processes.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest
from engine_models import reorder, write_embedding, write_mixed, write_models
from imports import import_or_skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not entry_points(group="sglang.srt.plugins", name="cutlass_ops"),
        reason="cutlass_ops is not installed",
    ),
]
import_or_skip("sglang")

KINDS = ("ct", "ct-asymmetric", "gptq", "awq", "w8a8")
#: A run's name, its model, dtype, the plugin's settings, and tensor parallel size.
RUNS: list[tuple[str, str, str, dict[str, str], int]] = [
    ("ct", "ct/quantised", "bfloat16", {}, 1),
    ("ct-asymmetric", "ct-asymmetric/quantised", "bfloat16", {}, 1),
    ("gptq", "gptq/quantised", "bfloat16", {}, 1),
    # SGLang has AWQ without AMX and Marlin in fp16 alone
    ("awq", "awq/quantised", "float16", {}, 1),
    ("w8a8", "w8a8/quantised", "bfloat16", {"act_quant": "none"}, 1),
    ("w8a8 default", "w8a8/quantised", "bfloat16", {}, 1),
    ("ct two ranks", "ct/quantised", "bfloat16", {"act_quant": "none"}, 2),
    ("directory", "ct/directory", "bfloat16", {}, 1),
    ("directory block", "ct/directory", "bfloat16", {"act_quant": "block"}, 1),
    ("directory two ranks", "ct/directory", "bfloat16", {}, 2),
    ("mixed", "mixed/directory", "bfloat16", {}, 1),
    ("mixed two ranks", "mixed/directory", "bfloat16", {}, 2),
    ("mixed dense", "mixed/dense", "bfloat16", {}, 1),
    ("mixed two ranks dense", "mixed/dense", "bfloat16", {}, 2),
    ("alone", "alone/directory", "bfloat16", {}, 1),
    ("alone dense", "alone/dense", "bfloat16", {}, 1),
    ("tied", "tied/directory", "bfloat16", {}, 1),
    ("tied two ranks", "tied/directory", "bfloat16", {}, 2),
    ("tied dense", "tied/dense", "bfloat16", {}, 1),
    ("ct dense", "ct/dense", "bfloat16", {}, 1),
    ("ct-asymmetric dense", "ct-asymmetric/dense", "bfloat16", {}, 1),
    ("awq dense", "awq/dense", "float16", {}, 1),
    ("w8a8 dense", "w8a8/dense", "bfloat16", {}, 1),
    ("ct two ranks dense", "ct/dense", "bfloat16", {}, 2),
]
KERNELS = '''
"""The names of SGLang's kernels, none of which can be called."""

__path__ = []


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is not installed")

    return kernel
'''
ENGINE = """
import json, os, sys
import sglang
from cutlass_ops.nn import MixedLinear
from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors

# On a CPU, too, SGLang asks torch for the GPU's capability.
config = compressed_tensors.CompressedTensorsConfig
config._check_scheme_supported = lambda self, capability, error=True: True

keep = MixedLinear.__init__
def told(self, packed, act_quant="none", *args):
    keep(self, packed, act_quant, *args)
    print("MODE", act_quant, flush=True)
MixedLinear.__init__ = told

def main():
    for name, model, dtype, settings, size in json.loads(sys.argv[1]):
        print("START", name, flush=True)
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * size)
        engine = sglang.Engine(
            model_path=model, skip_tokenizer_init=True, dtype=dtype, device="cpu", tp_size=size,
            context_length=64, max_total_tokens=512, max_running_requests=4, random_seed=0,
            disable_radix_cache=True, disable_overlap_schedule=True, disable_cuda_graph=True,
            attention_backend="torch_native", sampling_backend="pytorch",
            log_level="info", json_model_override_args=json.dumps({"cutlass_ops": settings}),
        )
        prompts = [[(7 * i + 31 * j) % 256 for j in range(5 + i)] for i in range(3)]
        how = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
        requests = engine.generate(input_ids=prompts, sampling_params=how)
        tokens = [request["output_ids"] for request in requests]
        print("RUN", json.dumps([name, tokens]), flush=True)
        engine.shutdown()

if __name__ == "__main__":
    main()
"""
#: A layer of the checkpoint sys.argv[1] by the configuration that SGLang has for it on a GPU.
LAYER = """
import json, sys
from dataclasses import replace
import torch
from cutlass_ops import dequantize
from cutlass_ops import sglang as plugin
from cutlass_ops.sglang import linear
from safetensors.torch import load_file
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.awq import awq
from sglang.srt.layers.quantization.gptq import gptq
from sglang.srt.layers.quantization.gptq.schemes import gptq_marlin
from sglang.srt.plugins.hook_registry import HookRegistry

plugin.register()
HookRegistry.apply_hooks()
linear.settings = dict  # no server has started
linear._Linear.engine = replace(linear.ENGINE, settings=dict, batch_invariant=lambda: False)
for module, name in ((awq, "verify_marlin_supported"), (gptq_marlin, "verify_marlin_supported")):
    setattr(module, name, lambda *args, **kwargs: None)  # they ask for a GPU's capability

folder, dense = sys.argv[1:]
config = json.load(open(f"{folder}/config.json"))["quantization_config"]
kind = {"gptq": gptq.GPTQMarlinConfig, "awq": awq.AWQMarlinConfig}[config["quant_method"]]
name = "model.layers.0.mlp.down_proj"
weight = load_file(f"{dense}/model.safetensors")[f"{name}.weight"]
n, k = weight.shape
layer = LinearBase(k, n)
method = kind.from_config(config).get_quant_method(layer, name)
method.create_weights(layer, k, [n], k, n, torch.bfloat16, weight_loader=None)
for key, value in load_file(f"{folder}/model.safetensors").items():
    if key.startswith(f"{name}."):
        getattr(layer, key.rpartition(".")[2]).data.copy_(value)
method.process_weights_after_loading(layer)
packed = layer.cutlass_ops_linear.packed
assert torch.equal(dequantize(packed, torch.bfloat16), weight)
assert method.apply(layer, torch.ones(2, k, dtype=torch.bfloat16)).shape == (2, n)
print(type(layer.scheme).__name__)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder that has the models, and the environment of SGLang."""
    folder = tmp_path_factory.mktemp("sglang")
    for kind in KINDS:
        write_models(folder / kind, kind)
    reorder(folder / "ct" / "quantised", folder / "ct" / "directory")
    write_mixed(folder / "mixed", folder / "ct" / "dense")
    for name in ("alone", "tied"):
        write_embedding(folder / name, folder / "ct" / "dense", name == "tied")
    for kind in ("directory", "dense"):  # SGLang then has one module as the embedding and the head
        path = folder / "tied" / kind / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if find_spec("sgl_kernel") is None:
        (folder / "kernels" / "sgl_kernel").mkdir(parents=True)
        (folder / "kernels" / "sgl_kernel" / "__init__.py").write_text(KERNELS)
        paths.append(str(folder / "kernels"))
    environment = {
        "HF_HUB_OFFLINE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    return folder, os.environ | environment


@pytest.mark.parametrize(
    ("kind", "scheme"), [("gptq", "GPTQMarlinLinearScheme"), ("awq", "AWQMarlinLinearScheme")]
)
def test_a_layer_that_sglang_has_for_gpus(
    models: tuple[Path, dict[str, str]], kind: str, scheme: str
) -> None:
    folder, environment = models
    command = [sys.executable, "-c", LAYER, folder / kind / "quantised", folder / kind / "dense"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-5000:]
    assert run.stdout.splitlines()[-1] == scheme


@pytest.fixture(scope="module")
def runs(
    models: tuple[Path, dict[str, str]],
) -> tuple[dict[str, tuple[list[list[int]], set[str]]], str]:
    """Tokens and the modes of our layers, by a run's name; and the log."""
    folder, environment = models
    script = folder / "engine.py"
    script.write_text(ENGINE)
    jobs = [(name, str(folder / model), *rest) for name, model, *rest in RUNS]
    run = subprocess.run(
        [sys.executable, script, json.dumps(jobs)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
    )
    assert run.returncode == 0, run.stdout[-5000:]
    found: dict[str, tuple[list[list[int]], set[str]]] = {}
    modes: set[str] = set()
    for line in run.stdout.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "START":
            modes = set()
        elif kind == "MODE":
            modes.add(rest)
        elif kind == "RUN":
            name, tokens = json.loads(rest)
            found[name] = tokens, modes
    return found, run.stdout


@pytest.mark.parametrize(
    ("run", "dense"),
    [
        ("ct", "ct"),
        ("ct-asymmetric", "ct-asymmetric"),
        ("gptq", "ct"),  # the same weights
        ("awq", "awq"),
        ("w8a8", "w8a8"),
        # sums of two ranks' products are rounded otherwise, with dense layers too
        ("ct two ranks", "ct two ranks"),
        ("directory", "ct"),
        ("directory two ranks", "ct two ranks"),
        ("mixed", "mixed"),
        ("mixed two ranks", "mixed two ranks"),
        ("alone", "alone"),
        ("tied", "tied"),
        ("tied two ranks", "tied"),
    ],
)
def test_tokens_are_those_of_the_dequantised_model(runs, run: str, dense: str) -> None:
    tokens, modes = runs[0][run]
    assert modes == {"none"}
    assert tokens == runs[0][f"{dense} dense"][0]


@pytest.mark.parametrize(("run", "mode"), [("w8a8 default", "token"), ("directory block", "block")])
def test_how_activations_are_quantised(runs, run: str, mode: str) -> None:
    assert runs[0][run][1] == {mode}


def test_the_log_names_the_methods(runs) -> None:
    for name in (
        "AWQLinearMethod",
        "GPTQLinearMethod",
        "CompressedTensorsLinearMethod",
        "packed linear layers",
    ):
        assert f"Using cutlass_ops for {name}" in runs[1]
