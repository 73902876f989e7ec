PYTHON ?= python3
BIN := .venv/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
LIBRARY := .venv/library
INSTALLED := .venv/installed
NATIVE := $(wildcard native/*.* native/*/*)

# Instruction sets that the kernels can use on this machine.
SETS := $(if $(shell grep -sw avx2 /proc/cpuinfo),avx2) baseline

.PHONY: help test quick gpu lint format demo docs bench sanitize $(SETS:%=sanitize-%) clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# The environment, made anew when what is installed into it changes: the library alone, with kernels for this machine, or
# with all kernels, the applications and what the tests need.
FOR_ALL := -C cmake.define.BELLMAX_BASELINE=ON
FOR_HERE := $(if $(filter avx2,$(SETS)),$(FOR_ALL:ON=OFF),$(FOR_ALL))

$(LIBRARY): pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(FOR_HERE) -e .
	touch $@

$(INSTALLED): pyproject.toml apps/pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(FOR_ALL) -e '.[test]' -e ./apps
	touch $(LIBRARY) $@

# Workers share the cores: threads that wait for each other must not spin.
test: lint  ## lint, then run every test and every docstring example
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -n auto --dist worksteal

quick: $(INSTALLED)  ## most tests of the library in two minutes: one Ω of each kind, both CPU backends, no lint
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -n auto --dist worksteal --quick tests

# Tests of their own, and those of structures that the emulator can afford.
EMULATED := tests/gpu tests/gpu_check $(addprefix tests/test_,scores.py ctc.py monotone.py transducer.py)
gpu: $(INSTALLED)  ## kernels for GPUs on an emulated one, and compiled for several
	$(BIN)/python -m pytest -q -n auto --dist worksteal -m '' -k 'gpu or triton' $(EMULATED)

lint: $(INSTALLED)  ## ruff and mypy
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED)  ## let ruff rewrite what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

demo: $(LIBRARY)  ## the main jobs on data made here, as a page: demo/index.html
	$(BIN)/python examples/demo.py

# pyctcdecode asks for an older numpy than it needs: --no-deps. aeon wants an older numba and numpy than the other peers, and dynamax installs JAX and a web server.
build/peers/installed:
	$(PYTHON) -m venv build/peers
	build/peers/bin/python -m pip install --quiet --disable-pip-version-check aeon dynamax
	touch $@

# Series of the UCR archive do not come along: BELLMAX_DATA is the folder that holds timeseries/NAME/NAME_TRAIN.tsv.
bench: $(INSTALLED) build/peers/installed  ## measure everything against its peers; writes docs/benchmarks
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt 'bellmax[bench]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps pyctcdecode pygtrie kenlm flashlight-text
	$(BIN)/python benchmarks/dag.py
	$(BIN)/python benchmarks/chain.py
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/ner.py
	$(BIN)/python benchmarks/translation.py
	$(BIN)/python benchmarks/dtw.py
	$(BIN)/python benchmarks/ctc.py
	$(BIN)/python benchmarks/lattices.py
	$(BIN)/python benchmarks/transducers.py
	$(BIN)/python benchmarks/trees.py
	$(BIN)/python benchmarks/programs.py
	$(BIN)/python benchmarks/automata.py
	$(BIN)/python benchmarks/samples.py
	$(BIN)/python benchmarks/hmm.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/limits.py
	$(BIN)/python benchmarks/omegas.py
	$(if $(BELLMAX_DATA),$(BIN)/python benchmarks/neighbors.py $(BELLMAX_DATA)/timeseries)
	$(BIN)/python benchmarks/page.py

docs: $(INSTALLED)  ## the documentation site with the demo page, in build/site
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt 'bellmax[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python examples/demo.py --output build/site/demo

# Another copy of the package with instrumented kernels of one instruction set, in two processes; -S keeps the editable
# install out of their way. BELLMAX_AVX2=OFF stands for a compiler without AVX2, so that the baseline is left.
ONLY_avx2 := -C cmake.define.BELLMAX_BASELINE=OFF
ONLY_baseline := -C cmake.define.BELLMAX_AVX2=OFF
SANITIZED := (native or hyper or automaton or programs_linear or sorting or lattice or tables or exp_space or neighbors or nonfinite or interrupts) and not compile and not export and not out_of_memory and not benchmarks
sanitize: $(SETS:%=sanitize-%)  ## the native tests under AddressSanitizer and UndefinedBehaviorSanitizer, by instruction set

$(SETS:%=sanitize-%): sanitize-%: $(INSTALLED)
	rm -rf build/sanitize/$*
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --no-index --target build/sanitize/$*/site \
	  -C build-dir=build/sanitize/$*/cmake -C cmake.define.BELLMAX_SANITIZE=address,undefined $(ONLY_$*) .
	printf '%s\n' 'dtw or lattice or tables or series or short or neighbors' 'not (dtw or lattice or tables or series or short or neighbors)' | \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 OMP_WAIT_POLICY=passive \
	xargs -P 2 -I{} $(BIN)/python -S -c "import sys; \
	  sys.path[:0] = ['build/sanitize/$*/site', '$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')']; \
	  import bellmax, pytest; assert bellmax.backend_info()['instructions'] == '$*'; \
	  sys.exit(pytest.main(['-qs', '-p', 'no:cacheprovider', 'tests', '-k', '$(SANITIZED) and ({})']))"

clean:  ## remove what was built
	rm -rf .venv build demo .mypy_cache .ruff_cache .pytest_cache .hypothesis
