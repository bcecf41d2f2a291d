# make test   lint, types and tests in .venv
# make soak   the tests that take minutes each: a hundred kills, every pair of topologies
# make peers  the tests that ask megatron-core, Lightning, Transformers, Accelerate, in .venv-peers
# make demo   examples/demo.py with the runtime dependencies alone, in .venv-demo, then
#             examples/demo_training.py with torch, in .venv-demo-torch
# make lint | docs | bench | clean

PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
WORKERS ?= 2
PIP_INSTALL = pip install -qq --constraint constraints.txt
INPUTS = pyproject.toml constraints.txt

.PHONY: test lint soak peers demo docs bench clean

test: lint
	.venv/bin/python -m pytest -n $(WORKERS) -m "not peers and not soak"

lint: .venv/.installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

soak: .venv/.installed
	.venv/bin/python -m pytest -m soak

peers: .venv-peers/.installed
	.venv-peers/bin/python -m pytest -n $(WORKERS) -m peers tests/peers

demo: .venv-demo/.installed .venv-demo-torch/.installed
	.venv-demo/bin/python examples/demo.py
	.venv-demo-torch/bin/python examples/demo_training.py

docs: .venv/.installed-docs
	.venv/bin/mkdocs build --strict

bench: .venv/.installed
	.venv/bin/python benchmarks/reshard.py --size 2GB

clean:
	rm -rf .venv .venv-peers .venv-demo .venv-demo-torch build dist site *.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis

# A stamp is younger than what it was installed from, so that a second run installs nothing.
# setuptools is put there first: without build isolation the constraints hold for it too.
.venv/.installed: $(INPUTS)
	$(PYTHON) -m venv .venv
	.venv/bin/$(PIP_INSTALL) setuptools
	.venv/bin/$(PIP_INSTALL) --no-build-isolation --editable '.[test,dev]'
	touch $@

.venv/.installed-docs: .venv/.installed
	.venv/bin/$(PIP_INSTALL) --no-build-isolation --editable '.[docs]'
	touch $@

# megatron-core is installed without its dependencies: they would bring another torch.
.venv-peers/.installed: $(INPUTS)
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/$(PIP_INSTALL) setuptools
	.venv-peers/bin/$(PIP_INSTALL) --no-build-isolation --editable '.[peers]'
	.venv-peers/bin/$(PIP_INSTALL) --no-deps megatron-core==0.16.1
	.venv-peers/bin/python -W ignore -c 'import megatron.core'
	touch $@

.venv-demo/.installed: $(INPUTS)
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/$(PIP_INSTALL) --editable .
	touch $@

.venv-demo-torch/.installed: $(INPUTS)
	$(PYTHON) -m venv .venv-demo-torch
	.venv-demo-torch/bin/$(PIP_INSTALL) --editable '.[torch]'
	touch $@
