# Everything here runs in a virtual environment of its own (.venv) and builds in build/make. It needs Python >= 3.10 with
# venv, a C++ compiler and make; nvcc, when it is there, makes it build CUDA; a GPU makes it use it.
#
#   make test     build, then every C++ and Python test          make lint     ruff, clang-format, mypy
#   make demo     reorder a real model and generate text         make format   apply ruff's and clang-format's order
#   make build    the package, editable, and the C++ tests       make docs     the documentation as a site, in build/docs
#   make clean    remove what these made

PYTHON ?= python3
VENV ?= .venv
BUILD ?= build/make
CUDA ?= AUTO
# What is installed when the environment has no torch. The package itself asks for any torch.
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
DEMO_ARGS ?=

PY := $(VENV)/bin/python
# What pip and CMake run must be this environment's: cmake, ninja, clang-format.
export PATH := $(abspath $(VENV))/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
CXX_SOURCES = $(shell find csrc tests/cpp -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: build test demo demo-build lint format docs clean
.DELETE_ON_ERROR:

# All that the package and its tests ask for, from pyproject.toml. CUTLASS and GoogleTest are wanted as files alone, so their
# packages come without dependencies. GoogleTest's has no wheel for some platforms: CMake then takes an installed one or says
# what is missing.
define REQUIREMENTS
import sys
try: import tomllib
except ImportError: import tomli as tomllib  # Python 3.10
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
print(*project["dependencies"], *sum((extras[name] for name in sys.argv[1:] or extras), []), sep="\n")
endef
export REQUIREMENTS

$(VENV)/.ready: pyproject.toml Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed: make PYTHON=...")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q cmake ninja pybind11 scikit-build-core
	$(PY) -c 'import torch' 2>/dev/null || $(PY) -m pip install -q "$(TORCH)"
	$(PY) -c "$$REQUIREMENTS" > $(VENV)/requirements.txt
	$(PY) -m pip install -q -r $(VENV)/requirements.txt
	if [ -z "$$CUTLASS_PATH" ] && [ "$(CUDA)" != OFF ] && command -v nvcc >/dev/null; then \
	  $(PY) -m pip install -q --no-deps nvidia-cutlass==4.2.0.0; fi
	$(PY) -m pip install -q --no-deps ros-gtest-vendor || echo "no GoogleTest from PyPI: the system's is tried"
	touch $@

# The build folder keeps its objects, so this builds only what changed.
build: $(VENV)/.ready
	@$(PY) -m pip install --no-build-isolation --no-deps -v -e . --config-settings=build-dir=$(BUILD) \
	  --config-settings=cmake.define.CUTLASS_OPS_CUDA=$(CUDA) --config-settings=cmake.define.CUTLASS_OPS_TESTS=ON \
	  > $(VENV)/build.log 2>&1 || { cat $(VENV)/build.log; exit 1; }
	@grep -E '^ *-- cutlass_ops:|kernels, at most|warning' $(VENV)/build.log || true

test: build
	ctest --test-dir $(BUILD) --output-on-failure -j 2
	$(PY) -m pytest $(PYTEST_ARGS)

# The demo compiles what this machine can run: CUDA where there is a GPU, for its architecture alone. After `make build` it takes what that built.
GPU := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1)
DEMO_CUDA = $(if $(filter AUTO,$(CUDA)),$(if $(GPU),AUTO,OFF),$(CUDA))
DEMO_ARCHITECTURES = $(if $(filter 9.0,$(GPU)),90a-real,$(if $(filter 8.%,$(GPU)),80-real,90-virtual))

$(VENV)/.demo-ready: pyproject.toml Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed: make PYTHON=...")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q cmake ninja pybind11 scikit-build-core
	$(PY) -c 'import torch' 2>/dev/null || $(PY) -m pip install -q "$(TORCH)"
	$(PY) -c "$$REQUIREMENTS" demo > $(VENV)/requirements-demo.txt
	$(PY) -m pip install -q -r $(VENV)/requirements-demo.txt
	if [ -z "$$CUTLASS_PATH" ] && [ "$(DEMO_CUDA)" != OFF ] && command -v nvcc >/dev/null; then \
	  $(PY) -m pip install -q --no-deps nvidia-cutlass==4.2.0.0; fi
	touch $@

demo-build: $(VENV)/.demo-ready
	@echo "$(if $(filter OFF,$(DEMO_CUDA)),No GPU is here: building for the CPU alone (make demo CUDA=ON builds the CUDA kernels too).,\
	  Building CUDA kernels for $(if $(GPU),this GPU (compute capability $(GPU)),$(DEMO_ARCHITECTURES)).)"
	@$(PY) -m pip install --no-build-isolation --no-deps -v -e . --config-settings=build-dir=build/demo \
	  --config-settings=cmake.define.CUTLASS_OPS_CUDA=$(DEMO_CUDA) \
	  --config-settings=cmake.define.CUTLASS_OPS_ARCHITECTURES=$(DEMO_ARCHITECTURES) \
	  > $(VENV)/build.log 2>&1 || { cat $(VENV)/build.log; exit 1; }

demo: $(if $(wildcard $(BUILD)/CMakeCache.txt),build,demo-build)
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
