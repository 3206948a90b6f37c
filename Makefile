# Everything that a newcomer needs. Each target installs what it uses; only make and Python 3.11 to 3.13 are required.
SUITS := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
unexport PYTHONDONTWRITEBYTECODE # If it were set, every process of a test would compile this project's modules again.
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3; do \
	$$python -c "$(SUITS)" 2> /dev/null && echo $$python && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
TORCH_CPU := https://download.pytorch.org/whl/cpu

.PHONY: help set-up demo test test-long test-all test-short test-tpu thorough soak lint bench clean

help:
	@echo "make demo   a small model on four emulated slices: five videos, and which slice computed what when"
	@echo "make test   run the tests"
	@echo "make test-long   the slow ones: real kills, jobs on emulated clusters"
	@echo "make test-all    both, together"
	@echo "make test-short  kernels, a model against diffusers, libtpu, media: what another Python and JAX may change"
	@echo "make test-tpu    kernels, models and meshes on the chips of this machine, then wan-tpu doctor"
	@echo "make thorough    each mechanism in every family, kind of file and way to die: an hour and more"
	@echo "make soak   new seeds of the simulations, random kills of a service, attackers: three quarters of an hour"
	@echo "make lint   ruff and mypy"
	@echo "make bench  time the small model against diffusers on this CPU"
	@echo "make clean  remove what the targets above made"

# Folders in packages whose modules are hardly ever imported, so that they aren't compiled ahead of time.
UNUSED := /(tests|testing|models|pipelines|modular_pipelines|_inductor|physics|networkx|fontTools|moto|pip|rllib|tune|train)/

# PyTorch's own CPU wheels come first: the default Linux wheel brings gigabytes of CUDA that no TPU host needs. pip
# skips an index that it can't reach. It would spend half of its time compiling all modules on one core, so compileall
# does that on all cores, and ignores the few files that aren't valid Python. `make UNUSED=.` compiles none of them.
$(VENV)/installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python from 3.11 to 3.13 with its venv module is here. As root, on Debian 12, Debian 13 or \
	Ubuntu 24.04: apt install python3-venv. Elsewhere: make PYTHON=/path/to/python3.13"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --retries 1 --timeout 10 --extra-index-url $(TORCH_CPU) "torch>=2.13,<2.14"
	$(BIN)/pip install --quiet --no-compile --editable ".[dev]" $(VERSIONS)
	$(BIN)/python -m compileall -qq -j 0 -x '$(UNUSED)' $(VENV)/lib || true
	touch $@

set-up: $(VENV)/installed

demo: $(VENV)/installed
	$(BIN)/python scripts/demo.py

# Four processes suit two cores: two for tests that start clusters, which wait half of their time, and two for others.
TESTS := $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder tests

test: $(VENV)/installed
	$(TESTS)

# Tests that kill processes, or run commands in separate processes. They take minutes, too long for every change.
test-long: $(VENV)/installed
	$(TESTS) -m "long and not thorough and not soak"

# Faster than running both one after the other, because common set-up is done only once.
test-all: $(VENV)/installed
	$(TESTS) -m "not thorough and not soak"

# What proves again, for other families, files, sizes and databases, what the tests above prove for one of each.
thorough: $(VENV)/installed
	$(TESTS) -m "thorough and not soak"

# What other versions of Python, JAX, libtpu and ffmpeg may change: each kernel against float64 and in Pallas' simulation
# of a TPU, one video against diffusers, programs that libtpu compiles and what is read in them, and videos of all kinds.
KERNELS := tests/kernels/test_
AOT := tests/wan_tpu/test_aot_tpu.py::
SHORT := $(KERNELS)flash_attention.py::test_flash_attention_equals_float64 \
	$(KERNELS)flash_attention.py::test_float32_is_computed_in_float32 \
	$(KERNELS)flash_attention.py::test_flash_attention_is_exact_in_simulated_tpu_memory \
	$(KERNELS)linear_and_norms.py::test_linear_is_torchs \
	$(KERNELS)linear_and_norms.py::test_kernels_are_exact_in_simulated_tpu_memory \
	$(KERNELS)low_precision.py::test_attention_of_some_heads_with_logits_in_8_bits \
	$(KERNELS)low_precision.py::test_layer_norm_returns_rounded_rows \
	$(KERNELS)low_precision.py::test_swiglu_multiplies_the_rounded_values \
	$(KERNELS)sparse_attention.py::test_sparse_attention_is_exact_in_simulated_tpu_memory \
	"$(KERNELS)causal_conv.py::test_causal_conv_is_torchs[two frames a product-bfloat16]" \
	$(KERNELS)causal_conv.py::test_no_tile_reads_what_another_has_not_written \
	$(KERNELS)group_norm.py::test_group_norm_is_exact_in_simulated_tpu_memory \
	"tests/wan_tpu/test_parity.py::test_same_latents_and_pixels_as_diffusers[wan2.1-t2v-1.3b-t2v-unipc]" \
	$(AOT)test_a_scanned_layer_is_found_with_its_work_and_its_collective \
	$(AOT)test_a_kernel_in_a_program_is_counted_alone \
	tests/wan_tpu/test_media_shown.py

# To test with the other versions of JAX and libtpu: `make test-short PYTHON=python3.11 VENV=build/python3.11`. VERSIONS
# are packages for pip, such as imageio-ffmpeg==0.8.
test-short: $(VENV)/installed
	$(BIN)/python -m pytest -n 0 -m "not thorough and not soak" $(SHORT)

# New seeds of the simulations for a quarter of an hour, then real kills and attacks; docs/benchmarks.md has figures.
soak: export WAN_TPU_SIMULATION_S ?= 450
soak: export WAN_TPU_CHAOS_JOBS ?= 120
soak: export WAN_TPU_CHAOS_KILLS ?= 40
soak: export WAN_TPU_ATTACK_S ?= 300
soak: export WAN_TPU_EXAMPLES ?= 60
soak: $(VENV)/installed
	$(BIN)/python -m pytest -s -m soak -o faulthandler_timeout=3600 tests

# On a TPU VM: kernels, models against diffusers, and meshes over all of its chips. Tests run one after the other,
# because only one process can use the chips. `WAN_TPU_TEST_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 make test-tpu` is a
# rehearsal without a TPU, in which kernels are interpreted.
test-tpu: export WAN_TPU_TEST_PLATFORMS ?= tpu,cpu
test-tpu: $(VENV)/installed
	$(BIN)/python -m pytest -n 0 tests/kernels --ignore tests/kernels/test_bundles.py \
		tests/wan_tpu/test_sparse_linear.py -m "not thorough"
	$(BIN)/python -m pytest -n 0 tests/wan_tpu/test_parity.py \
		tests/wan_tpu/test_cogvideox_parity.py tests/wan_tpu/test_hunyuan15_parity.py tests/wan_tpu/test_ltx2_parity.py \
		tests/wan_tpu/test_minimax_h3_parity.py -m "not long and not thorough and not loads_libtpu"
	$(BIN)/python -m pytest -n 0 -rs -m meshes tests/wan_tpu
	$(BIN)/wan-tpu doctor

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -n auto

bench: $(VENV)/installed
	$(BIN)/python scripts/bench.py --against diffusers

clean:
	rm -rf $(VENV) build demo *.egg-info
