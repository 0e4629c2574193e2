# The only entrance. `make` lists the targets.
#
# PYTHON=/path/python  an environment that has torch already; nothing but the package is installed into it (default: .venv is made)
# TORCH="torch --index-url URL"  what pip is asked for when .venv is made, e.g. a CPU-only build (default: torch>=2.4)
SHELL := /bin/bash
export TORCH PYTHON
PY := $(if $(PYTHON),$(PYTHON),.venv/bin/python)
OUT := build/out
# The version script is refused in #cgo lines and applied twice in CGO_LDFLAGS; here it works.
LDFLAGS := -s -w -extldflags "-Wl,--version-script=$(CURDIR)/capi/gdn.map -Wl,-soname,libgdn.so.0"
GO_TEST := go test -timeout 20m
# PyTorch's threads wait for each other by spinning for some ten milliseconds at each operation. Where another program has one of the cores, that
# makes them 50 times slower (the demo on two cores). The benchmark keeps the default.
test quick demo: export GOMP_SPINCOUNT ?= 1000

.PHONY: help lib cann gen test test-slow test-npu quick demo bench check asan arm64 wheel clean

help: ## this list
	@awk -F ': .*## ' '/^[a-z0-9-]+: .*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo 'PYTHON=/path/python uses an environment with torch; TORCH="torch --index-url ..." picks the build that .venv gets'

lib: $(OUT)/libgdn.so ## build/out/libgdn.so

# Left to itself, go compiles all C anew for each c-shared build (it caches no package that exports nothing to C), so make looks first.
# Folders are in the list because a removed file counts too.
$(OUT)/libgdn.so: $(shell find go.mod go.sum Makefile ascendc capi core include kernels -name testdata -prune -o -name '*_test.go' -o -print)
	@build/tools.sh
	@mkdir -p $(OUT)
	go build -buildmode=c-shared -trimpath -ldflags '$(LDFLAGS)' -o $(OUT)/libgdn.so ./capi
	@rm -f $(OUT)/libgdn.h
	@ln -sf libgdn.so $(OUT)/libgdn.so.0
	@touch $@

cann: $(OUT)/.cann$(SAN) ## build/out/cann: fake CANN libraries, see ascendc/fake/README.md (SAN=1: also with AddressSanitizer)

$(OUT)/.cann$(SAN): $(wildcard ascendc/fake/*)
	SAN=$(SAN) ascendc/fake/build.sh
	@touch $@

gen: ## everything that follows from the table in core/ops*.go: header, C entries, kernel indices, Python table
	@build/tools.sh
	go run ./core/opgen

# Both suites always run, so that one failure does not hide another.
test: lib ## Go suite, then pytest: proves the library right
	@build/env.sh test
	@failed=0; \
	echo '$(GO_TEST) ./...'; $(GO_TEST) ./... || failed=1; \
	echo '$(PY) -m pytest'; $(PY) -m pytest || failed=1; \
	exit $$failed

test-npu: lib cann ## the NPU part of pytest: the released torch_npu on the fake CANN, in an environment of its own (NPU=2.8: the older pair)
	@build/npu.sh $(ARGS)

quick: lib ## the same without the slow tests, under two minutes
	@build/env.sh test
	@failed=0; \
	echo '$(GO_TEST) -short ./...'; $(GO_TEST) -short ./... || failed=1; \
	echo '$(PY) -m pytest -m "not slow"'; $(PY) -m pytest -m 'not slow' || failed=1; \
	exit $$failed

test-slow: cann ## the list of bugs that the Ascend suite must catch, each built in turn (ascendc/mutations_test.go), some ten minutes
	GDN_TEST_MUTATIONS=1 go test -timeout 60m -count 1 -v -run TestMutations ./ascendc

demo: lib ## train a small language model of GDN layers on real text, about two minutes (ARGS="--text FILE --seconds 60")
	@build/env.sh demo
	@$(PY) examples/lm.py $(ARGS)

bench: lib ## time the operators beside the machine's peak and other implementations (ONLY=pattern runs some rows)
	@build/env.sh bench
	@$(PY) build/bench.py $(if $(ONLY),--only '$(ONLY)') $(ARGS)

check: lib ## formatting, vet, generated files, exports, headers, clean tree
	@build/check.sh

asan: ## the Go suite of the kernels under AddressSanitizer
	@build/tools.sh
	CGO_ENABLED=1 $(GO_TEST) -asan -short ./kernels/cpu/... ./core/conform/...

arm64: ## cross build and the Go suite under qemu (Debian: gcc-aarch64-linux-gnu, qemu-user-static)
	@build/tools.sh
	@build/arm64.sh

wheel: lib ## build/out/gdn-*.whl with libgdn.so inside
	@build/env.sh pip
	@rm -rf $(OUT)/*.whl $(OUT)/py
	$(PY) -m pip wheel --quiet --no-deps --wheel-dir $(OUT) .
	@ls -l $(OUT)/*.whl

clean: ## remove what was built; .venv stays
	rm -rf $(OUT) python/*.egg-info
