# `make demo` and `make test` work in a clean clone: the virtual environment is made on first use.
# There is no build target and `clean` leaves build/ alone: that folder is the generator's source.

ifeq ($(origin PYTHON),undefined)
# That of .venv, which was made with the one that somebody named.
PYTHON = $(shell .venv/bin/python -c 'print(".venv/bin/python")' 2> /dev/null || echo python3)
endif
# More than the cores that it takes, because tests wait.
WORKERS ?= 6
VENV := .venv
BIN := $(VENV)/bin
# Stamps: what the demo needs is in .venv; what the tests need, too.
DEMO := $(VENV)/.demo
INSTALLED := $(VENV)/.installed
XDIST = --numprocesses $(WORKERS) --dist loadgroup --no-loadscope-reorder
# Workers that each compute with all cores wait for one another.
PYTEST = OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest $(XDIST)
# A test starts hundreds of Pythons, each of which would compile numpy anew.
unexport PYTHONDONTWRITEBYTECODE
HOST := tools/deepseek_triton_tools/host
# Of a Python to which the checks in $(HOST) are no Python.
TOO_OLD := "Python 3.10, 3.11 or 3.12 is needed, this is %d.%d: name another, as in `make PYTHON=python3.12`"
# vLLM has an environment of its own: it needs torch, and pins a CUDA build that the tests don't need.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_INSTALLED := $(VLLM_VENV)/.installed
# So have the clients of others that ask the gateway: their pins are not ours.
CLIENTS_VENV := .venv-conformance
CLIENTS_BIN := $(CLIENTS_VENV)/bin
CLIENTS_INSTALLED := $(CLIENTS_VENV)/.installed
# And AIConfigurator, whose tables `plan --sla` asks for: it needs numpy 2.
PACES_VENV := .venv-aiconfigurator
PACES_BIN := $(PACES_VENV)/bin
PACES_INSTALLED := $(PACES_VENV)/.installed
# The auditor has one that may be half made, or another folder's: it is asked as a module, by no script.
AUDITOR := .cache/audit/bin/python -m
REQUIREMENTS := tools/docker/requirements.txt
UNIT := tests/backend tests/build tests/client tests/contract tests/gateway tests/tools
# `make test-vllm ONLY=sample` runs what .ci/run runs of a lane.
ONLY ?=
CHOSEN = $(if $(ONLY),-m "$(ONLY)")

TRAINED := .cache/tiny-checkpoint
# How the embedded checkpoint is trained again. The last line prints its scores.
define TRAINING
export PYTHONPATH=model_repository/tensorrt_llm/1
$(BIN)/python -m tiny_checkpoint.tokenizer $(TRAINED)
$(BIN)/python -m tiny_checkpoint.train --output $(TRAINED)
$(BIN)/python -m tiny_checkpoint.export $(TRAINED) $(TRAINED)/tiny
$(BIN)/python -m tiny_checkpoint.answering answer $(TRAINED)/tiny $(TRAINED)/answers.json
$(BIN)/python -m tiny_checkpoint.answering score $(TRAINED)/answers.json
endef

# Libraries of another Python in .venv, which is then made anew: two Pythons in one folder work by chance.
OTHERS = $(filter-out $(VENV)/lib/$(shell $(PYTHON) -c 'import sys; print("python%d.%d" % sys.version_info[:2])'),$(wildcard $(VENV)/lib/*))
# Of a stamp: `renew` where what lies beside it was installed for another folder, as in a clone that was copied or moved.
# Its scripts name a Python of that folder, and its code is run. A .venv that is a link was meant to be shared.
moved = $(shell test -h $(patsubst %/,%,$(dir $(1))) || test ! -e $(1) \
  || { test ! -s $(1) && grep -sqxF "$$(pwd -P)/build" $(dir $(1))lib/*/site-packages/_deepseek_triton.pth; } || echo renew)
# Until all is installed again the stamp says so: pip writes the file above long before its end.
BEGUN = $(if $(call moved,$@),@echo renew > $@)
# An interrupt takes no such stamp away.
.PRECIOUS: $(DEMO) $(VLLM_INSTALLED) $(CLIENTS_INSTALLED)
# Takes nothing away before all is fetched.
AGAIN := --force-reinstall pip

.PHONY: renew help environments venv demo unit test nightly house mutants test-vllm test-gateway test-sla lint types docs generated tiny-checkpoint check \
  release smoke audit requirements clean

help:  ## show this
	@grep -E '^[a-z-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:[^#]*## */\t/' | expand -t 17

environments: $(INSTALLED) $(VLLM_INSTALLED) $(CLIENTS_INSTALLED) $(PACES_INSTALLED)

venv: $(INSTALLED)  ## make .venv with everything in it; `make venv PYTHON=python3.12` with another Python

demo: $(DEMO)  ## see it work: a tiny DeepSeek on a real tritonserver, without a GPU
	@$(BIN)/deepseek-triton demo

unit: $(INSTALLED)  ## run the quick tests, without a server: what you run while you work
	@$(PYTEST) --numprocesses 3 -m "not (slow or nightly or documents)" $(UNIT)

test: $(INSTALLED)  ## run the tests of the code, WORKERS=6 at a time
	@for each in $(TESTS); do case "$$each" in -*) break;; esac; test -e "$${each%%::*}" \
	  || { echo "TESTS: no such file or folder: $${each%%::*}" >&2; bad=2; }; done; exit $${bad:-0}
	@$(PYTEST) -m "not (nightly or documents)" $(TESTS)

nightly: $(INSTALLED)  ## run what takes long by nature: campaigns, several hosts, whole lanes, the release
	@$(PYTEST) --timeout 3600 -m nightly
	@$(MAKE) --no-print-directory test-vllm test-gateway test-sla

house: $(INSTALLED)  ## see what the code costs: lines, modules, functions with one caller, comments, pages
	@$(BIN)/python tests/house.py

mutants: $(INSTALLED)  ## see how many of 400 small faults in the product `make test` finds
	@PYTHONPATH=tests $(BIN)/python -m mutants.run

test-vllm: $(VLLM_INSTALLED)  ## run vLLM itself without a GPU, in an environment of its own (2 GB)
	@$(VLLM_BIN)/python -m pytest $(XDIST) --numprocesses 3 \
	--override-ini filterwarnings=default -p no:unraisableexception --engine vllm $(if $(ONLY),-m "$(ONLY) and not nightly") \
	tests/with_vllm tests/live tests/build/test_vllm_records.py

test-gateway: $(DEMO) $(CLIENTS_INSTALLED)  ## ask the gateway with the clients of others, in an environment of its own (1 GB)
	@$(CLIENTS_BIN)/python -m pytest -c tests/conformance/pytest.ini $(CHOSEN) tests/conformance

test-sla: $(INSTALLED) $(PACES_INSTALLED)  ## ask AIConfigurator, in an environment of its own (690 MB)
	@$(BIN)/python -m pytest tests/tools/sla/test_real_aiconfigurator.py tests/build/test_dynamo_adapter.py

lint: $(INSTALLED)  ## ruff: rules and formatting; import-linter: the layers between folders; the limits in tests/house.py
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@PYTHONPATH=model_repository/tensorrt_llm/1 $(BIN)/lint-imports --no-cache
	@$(BIN)/python tests/house.py > /dev/null

types: $(INSTALLED)  ## mypy, strict
	@$(BIN)/mypy

docs: $(INSTALLED)  ## build the documentation as a site into .cache/site, where a broken link is an error; run its snippets
	@rm -rf .cache/site .cache/[0-9]*  # zensical's cache, whose --clean takes .cache/docs along
	@$(BIN)/python -m deepseek_triton_tools.generated_files --site .cache/docs
	@if test -x $(BIN)/zensical; then $(BIN)/zensical build --strict; else echo "no site is built: Zensical needs Python 3.11"; fi; \
	site=$$?; $(PYTEST) -m documents && exit $$site

generated: $(INSTALLED)  ## write config.pbtxt, model.yaml and docs/contract.md again
	@$(BIN)/python -m deepseek_triton_tools.generated_files

tiny-checkpoint: export COMMANDS = $(TRAINING)
tiny-checkpoint: $(DEMO)  ## train the embedded checkpoint again, in minutes on a GPU; without one it says how
	@if $(BIN)/python -c 'import torch; torch.zeros(1, device="cuda")' 2>/dev/null; then sh -exc "$$COMMANDS"; else \
	echo "This needs a GPU and a torch that can use it: $(BIN)/pip install --group training. Then:"; echo "$$COMMANDS"; fi

check: lint types docs test  ## lint, types, docs and test

release: $(INSTALLED)  ## wheel, sdist, SBOM and checksums of the commit into dist/, and try them in bare environments
	@PYTHONPATH=tools $(BIN)/python -m releasing.make_release
	@$(MAKE) --no-print-directory smoke

smoke: $(INSTALLED)  ## install what is in dist/ into bare environments, and use it there
	@PYTHONPATH=tools $(BIN)/python -m releasing.smoke dist

# It asks the vulnerability service of PyPI.
audit: $(REQUIREMENTS)  ## look for known vulnerabilities in the pinned requirements of the image
	@$(AUDITOR) pip show --quiet pip 2> /dev/null || $(PYTHON) -m venv --clear .cache/audit
	@$(AUDITOR) pip install --quiet 'pip-audit>=2.9,<3'
	@$(AUDITOR) pip_audit --strict --disable-pip --require-hashes --requirement $(REQUIREMENTS)

requirements: pyproject.toml  ## renew the pinned requirements of the image, with their hashes
	@$(AUDITOR) pip show --quiet pip 2> /dev/null || $(PYTHON) -m venv --clear .cache/audit
	@$(AUDITOR) pip install --quiet 'uv>=0.9,<1'
	@UV_CUSTOM_COMPILE_COMMAND='make requirements' $(AUDITOR) uv pip compile --quiet --universal --upgrade \
	--python-version 3.12 --extra tools --extra gateway --extra tracing --generate-hashes --no-emit-index-url \
	--no-emit-find-links --no-annotate pyproject.toml --output-file $(REQUIREMENTS)

clean:  ## remove the environments and what the tools leave
	rm -rf $(VENV) $(VLLM_VENV) $(CLIENTS_VENV) $(PACES_VENV) dist .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(DEMO): pyproject.toml $(call moved,$(DEMO)) $(if $(filter command line,$(origin PYTHON)),$(if $(OTHERS),renew))
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 8) or sys.exit($(TOO_OLD) % sys.version_info[:2])'
	@$(PYTHON) $(HOST)/preflight.py
	@echo "installing what the demo needs into $(VENV)"
	$(BEGUN)
	@$(PYTHON) -m venv --without-pip $(if $(OTHERS),--clear) $(VENV)
	@$(BIN)/python $(HOST)/pip_install.py $(VENV)/pip.log $(if $(call moved,$@),$(AGAIN) $(if $(wildcard $(INSTALLED)),--group dev)) --editable '.[demo]'
	@: > $@

$(INSTALLED): $(DEMO)
	@echo "installing what the tests need into $(VENV)"
	@$(BIN)/python $(HOST)/pip_install.py $(VENV)/pip.log --editable '.[demo,tracing]' --group dev
	@touch $@

# numpy's own pin (below 2) holds in one pip for all; what asks for another torch or numpy is installed alone.
$(VLLM_INSTALLED): pyproject.toml $(call moved,$(VLLM_INSTALLED))
	@$(PYTHON) $(HOST)/preflight.py
	@echo "installing vLLM and what its tests need into $(VLLM_VENV)"
	$(BEGUN)
	@$(PYTHON) -m venv --without-pip $(VLLM_VENV)
	@$(VLLM_BIN)/python $(HOST)/pip_install.py $(VLLM_VENV)/pip.log $(if $(call moved,$@),$(AGAIN)) --editable '.[demo]' --group vllm
	@$(VLLM_BIN)/python $(HOST)/pip_install.py $(VLLM_VENV)/pip.log --no-deps --group vllm-alone
	@$(VLLM_BIN)/python $(HOST)/pip_install.py $(VLLM_VENV)/pip.log --no-deps --editable tests/with_vllm/without_gpu
	@: > $@

# The servers run from .venv: here are only the clients, and ours to compare with.
$(CLIENTS_INSTALLED): pyproject.toml $(call moved,$(CLIENTS_INSTALLED))
	@$(PYTHON) $(HOST)/preflight.py
	@echo "installing the clients that ask the gateway into $(CLIENTS_VENV)"
	$(BEGUN)
	@$(PYTHON) -m venv --without-pip $(CLIENTS_VENV)
	@$(CLIENTS_BIN)/python $(HOST)/pip_install.py $(CLIENTS_VENV)/pip.log $(if $(call moved,$@),$(AGAIN)) --editable . --group conformance
	@$(CLIENTS_BIN)/python $(HOST)/pip_install.py $(CLIENTS_VENV)/pip.log --no-deps --group conformance-alone
	@: > $@

# Only Python 3.11 to 3.13 has it.
$(PACES_INSTALLED): pyproject.toml
	@echo "installing AIConfigurator's tables into $(PACES_VENV)"
	@$(PYTHON) -m venv --without-pip $(PACES_VENV)
	@$(PACES_BIN)/python $(HOST)/pip_install.py $(PACES_VENV)/pip.log --group aiconfigurator
	@touch $@
