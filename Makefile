# All targets use the virtual environment .venv and build in build/. They need Python >= 3.10 with venv, a C++ compiler
# and make. CUDA is built where nvcc is installed, and used where there is a GPU.
#
#   make test     build, then every C++ and Python test          make lint     ruff, clang-format, mypy
#   make demo     reorder a real model and generate text         make format   apply ruff's and clang-format's formatting
#   make build    the package, editable, and the C++ tests       make docs     the documentation as a site, in build/docs
#   make wheel    a wheel, in dist/                              make oldest   tests with the oldest dependencies allowed
#   make clean    remove what these made                         make newest   tests with the newest dependencies there are
#   make constraints   renew constraints.txt, the versions that all others install
#
# `make demo` installs and compiles only what it needs on this machine: the CPU code and, where there is a GPU, the kernels of
# its architecture. Everything else compiles every architecture.

PYTHON ?= python3
VENV ?= .venv
CUDA ?= AUTO
# CPU and CUDA builds have separate folders, so that neither discards the other's objects.
KIND := $(if $(filter OFF,$(CUDA)),cpu,$(if $(filter ON,$(CUDA))$(shell command -v nvcc),cuda,cpu))
BUILD ?= build/make-$(KIND)
# The versions of everything that is installed.
CONSTRAINTS ?= constraints.txt
# Installed when the environment has no torch, with its dependencies: arguments of pip.
TORCH ?= torch -c $(CONSTRAINTS)
PYTEST_ARGS ?=
# A CPU generates few tokens a second, and the demo generates four times.
DEMO_ARGS ?= $(if $(filter OFF,$(DEMO_CUDA)),--tokens 16)

PY := $(VENV)/bin/python
# A process a core, each with one thread.
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest -n auto
# pip and CMake must find this environment's cmake, ninja and clang-format.
export PATH := $(abspath $(VENV))/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Python compiles modules when they are imported; pip would compile all of them.
export PIP_NO_COMPILE := 1
CXX_SOURCES = $(shell find csrc tests/cpp tools examples -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: build test oldest newest constraints wheel demo lint format docs clean
.DELETE_ON_ERROR:

# The requirements of the package and of the given extras, from pyproject.toml.
define REQUIREMENTS
import sys
try: import tomllib
except ImportError: from pip._vendor import tomli as tomllib  # Python 3.10
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
print(*project["dependencies"], *sum((extras[name] for name in sys.argv[1:] or extras), []), sep="\n")
endef
export REQUIREMENTS

# The constraints beside the torch of this environment: torch stays, and so do its requirements.
define CONSTRAIN
import sys
from importlib.metadata import requires, version
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name
asked = map(Requirement, requires("torch") or ())
kept = {"torch", *(canonicalize_name(other.name) for other in asked if not other.marker or other.marker.evaluate({"extra": ""}))}
print("torch==" + version("torch"))
print(*(line for line in open(sys.argv[1]) if line.split("==")[0] not in kept), sep="")
endef
export CONSTRAIN

# $(call install,EXTRAS): the requirements of the package and of these extras, or of all. Only the headers of CUTLASS are needed,
# so its package is installed without dependencies. A package without a wheel (hqq) is built with the setuptools installed first:
# an environment that pip makes for its build has no constraints.
PIP_INSTALL = $(PY) -m pip install -q --no-build-isolation --use-pep517 -c $(VENV)/constraints.txt
define install
	$(PY) -c "$$REQUIREMENTS" $(1) > $(VENV)/requirements.txt
	$(PIP_INSTALL) -r $(VENV)/requirements.txt
endef
BUILD_TOOLS := cmake ninja pybind11 scikit-build-core setuptools
CUTLASS = if [ -z "$$CUTLASS_PATH" ] && command -v nvcc >/dev/null; then \
	  $(PY) -m pip install -q --no-deps nvidia-cutlass==4.2.0.0; fi

# $(call compile,PIP,FOLDER,CUDA,OPTIONS): an editable install or a wheel, by pip. The build folder keeps its objects, so
# this compiles only what changed.
define compile
	@$(PY) -m pip $(1) --no-build-isolation --no-deps -v --config-settings=build-dir=$(2) \
	  --config-settings=cmake.define.CUTLASS_OPS_CUDA=$(3) $(4:%='--config-settings=cmake.define.%') \
	  > $(VENV)/build.log 2>&1 || { cat $(VENV)/build.log; exit 1; }
	@grep -E '^ *-- cutlass_ops:|kernels, at most|warning' $(VENV)/build.log || true
endef

$(VENV)/.base: pyproject.toml Makefile $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed: make PYTHON=...")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -c 'import torch' 2>/dev/null || $(PY) -m pip install -q $(TORCH)
	$(PY) -c "$$CONSTRAIN" $(CONSTRAINTS) > $(VENV)/constraints.txt
	$(PIP_INSTALL) $(BUILD_TOOLS)
	touch $@

# GoogleTest is installed without dependencies, too. Its package has no wheel for some platforms: CMake then uses an installed
# one or reports what is missing.
$(VENV)/.ready: $(VENV)/.base
	$(call install)
	$(if $(filter OFF,$(CUDA)),,$(CUTLASS))
	$(PIP_INSTALL) --no-deps ros-gtest-vendor || echo "no GoogleTest from PyPI: the system's is tried"
	touch $@

build: $(VENV)/.ready
	$(call compile,install -e .,$(BUILD),$(CUDA),CUTLASS_OPS_TESTS=ON)

test: build
	ctest --test-dir $(BUILD) --output-on-failure -j 2
	$(PYTEST) $(PYTEST_ARGS)

# The lower bounds of pyproject.toml, first on the path, except torch's, whose old releases take gigabytes.
define BOUNDS
from importlib.metadata import requires
print(*(line.replace(">=", "==") for line in requires("cutlass_ops") if "extra ==" not in line and not line.startswith("torch")), sep="\n")
endef
export BOUNDS

# transformers and PEFT at their lower bounds want other versions of packages beside them: those of constraints-oldest.txt.
oldest: build
	rm -rf build/oldest build/oldest-hf
	$(PY) -c "$$BOUNDS" > $(VENV)/oldest.txt
	$(PY) -m pip install -q --no-deps --target build/oldest -r $(VENV)/oldest.txt
	PYTHONPATH=$(abspath build/oldest) $(PYTEST) -q -m "not slow and not gpu" \
	  tests/test_cli.py tests/test_reorder.py tests/test_reorder_checkpoint.py tests/test_ops.py
	grep -vxFf constraints.txt constraints-oldest.txt > $(VENV)/oldest.txt
	$(PY) -m pip install -q --no-deps --target build/oldest-hf -r $(VENV)/oldest.txt
	PYTHONPATH=$(abspath build/oldest-hf) $(PYTEST) -q -m "not slow and not gpu" \
	  tests/test_gguf_models.py tests/test_hf.py tests/test_hf_config.py tests/test_hf_dialects.py tests/test_load_model.py \
	  tests/test_packed_state.py tests/test_peft.py tests/test_quantize_hf_model.py tests/test_quantize_model.py tests/test_registration.py

# Every test without constraints, in a new environment. pytest says which versions are others than in constraints.txt.
newest:
	rm -rf build/newest
	$(MAKE) test VENV=build/newest/venv BUILD=build/newest/build CONSTRAINTS=/dev/null

# Held back in constraints.txt: transformers 5.24 uses adapters with PEFT 0.22 alone, which PyPI does not have.
HELD = 'torch==2.13.0' 'transformers<5.24'

# For Python 3.10 and later, on any platform. Torch pins the packages of CUDA that it needs.
# $(call resolve,FILE,OPTIONS): the versions for the requirements of $(VENV)/requirements.txt.
define resolve
	uv pip compile -q --upgrade --universal --python-version 3.10 --no-annotate --no-header --no-python-downloads $(2) \
	  -o $(VENV)/compiled.txt $(VENV)/requirements.txt
	{ echo "# Made by make constraints."; grep -vE '^(nvidia-|cuda-toolkit|triton)' $(VENV)/compiled.txt; } > $(1)
endef
constraints: $(VENV)/.base
	$(PIP_INSTALL) uv
	{ $(PY) -c "$$REQUIREMENTS"; printf '%s\n' uv ros-gtest-vendor $(BUILD_TOOLS) $(HELD); } > $(VENV)/requirements.txt
	$(call resolve,constraints.txt)
	{ $(PY) -c "$$REQUIREMENTS" hf demo peft; printf '%s\n' $(HELD); } > $(VENV)/requirements.txt
	$(call resolve,constraints-oldest.txt,--resolution lowest-direct)

# For the Python of the environment, and this machine's glibc or a later one: auditwheel names it in the tag, and fails where a
# library would be needed that not every Linux has. The wheels of both kinds have one name, so each has a folder.
wheel: $(VENV)/.ready
	rm -rf $(BUILD)/dist dist/$(KIND)
	$(call compile,wheel -w $(BUILD)/dist .,$(BUILD),$(CUDA),CUTLASS_OPS_TESTS=ON)
	$(PY) -m auditwheel repair -w dist/$(KIND) $(BUILD)/dist/*.whl
	CUTLASS_OPS_WHEEL=$$(echo dist/$(KIND)/*.whl) $(PY) -m pytest -q tests/test_wheel.py

# The architectures of the GPUs here, as CMake writes them; nothing without a GPU that the kernels run on.
GPUS = $(eval GPUS := $$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
  sed -nE 's/^8\..*/80-real/p; s/^9\.0.*/90a-real/p; s/^[1-9][0-9]\..*/90-virtual/p' | sort -u | paste -sd ';'))$(GPUS)
DEMO_CUDA = $(if $(GPUS),$(CUDA),$(CUDA:AUTO=OFF))

$(VENV)/.demo: $(VENV)/.base
	$(call install,demo)
	touch $@

# CUDA=ON without a GPU compiles every architecture.
demo: $(VENV)/.demo
	@$(if $(GPUS),,$(if $(filter AUTO,$(CUDA)),echo "No GPU here: the CPU code alone is compiled. make demo CUDA=ON compiles CUDA too."))
	@$(if $(filter OFF,$(DEMO_CUDA)),,$(CUTLASS))
	$(call compile,install -e .,build/demo,$(DEMO_CUDA),$(if $(GPUS),CUTLASS_OPS_ARCHITECTURES=$(GPUS)))
	$(VENV)/bin/cutlass-ops demo $(DEMO_ARGS)

lint: $(VENV)/.ready
	ruff check --output-format concise .
	ruff format --check .
	clang-format --dry-run --Werror $(CXX_SOURCES)
	$(PY) -m mypy

# The site, into build/docs. (mkdocs-material announces MkDocs 2 at every build otherwise.)
docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 mkdocs build --quiet

format: $(VENV)/.ready
	ruff check --fix --select I .
	ruff format .
	clang-format -i $(CXX_SOURCES)

clean:
	rm -rf build dist $(VENV)
