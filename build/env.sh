#!/bin/bash
# Prepares the Python environment: .venv, or the one that $PYTHON names. A second run finds everything done and ends at once.
# usage: build/env.sh test|demo|bench|pip    what the environment is needed for; pip: for no more than pip
set -eu
cd "$(dirname "$0")/.."
purpose=$1
: "${TORCH:=torch>=2.4}"

refuse() { echo "libgdn: $*" >&2; exit 1; }
say() { echo "== $*"; }

# has PYTHON MODULE...: can it import them all? Nothing is imported, torch alone would take seconds.
has() { "$1" -c 'import sys, importlib.util as u; sys.exit(not all(u.find_spec(m) for m in sys.argv[1:]))' "${@:2}"; }
recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 9))'; }

if [ -n "${PYTHON:-}" ]; then
	command -v "$PYTHON" >/dev/null || refuse "PYTHON=$PYTHON is not a program."
	recent "$PYTHON" || refuse "PYTHON=$PYTHON is $("$PYTHON" -V); libgdn needs Python 3.9 or later."
	[ "$purpose" != pip ] || exit 0
	has "$PYTHON" torch || refuse "PYTHON=$PYTHON has no torch. Install torch>=2.4 there, or leave PYTHON out: then .venv gets its own."
	case $purpose in
	test) has "$PYTHON" pytest numpy || refuse "PYTHON=$PYTHON lacks pytest or numpy, which the tests need; only the package itself is installed there." ;;
	demo) has "$PYTHON" matplotlib || refuse "PYTHON=$PYTHON lacks matplotlib, which draws the loss curve; only the package itself is installed there." ;;
	bench) has "$PYTHON" transformers || say "PYTHON=$PYTHON has no transformers: that peer will not be measured." ;;
	esac
	if ! "$PYTHON" -c 'import sys, importlib.util as u; s = u.find_spec("gdn"); sys.exit(not s or s.origin != sys.argv[1])' "$PWD/python/gdn/__init__.py"; then
		say "installing the package gdn (this checkout, editable) into $PYTHON"
		"$PYTHON" -m pip install --quiet --no-deps --editable .
	fi
	exit
fi

venv=.venv/bin/python
stamp=.venv/.gdn-ready
wanted="torch: $TORCH, package: $(cksum <pyproject.toml), in: $PWD"
if [ "$(cat $stamp 2>/dev/null)" != "$wanted" ]; then
	if ! $venv -m pip --version >/dev/null 2>&1; then
		command -v python3 >/dev/null || refuse "python3 is not on PATH; libgdn needs Python 3.9 or later."
		recent python3 || refuse "python3 is $(python3 -V); libgdn needs Python 3.9 or later."
		has python3 ensurepip || refuse "python3 cannot make virtual environments (Debian: install python3-venv)."
		say "making a virtual environment in .venv with $(python3 -V)"
		python3 -m venv --clear .venv
		$venv -m pip install --quiet --upgrade pip
	fi
	[ "$purpose" != pip ] || exit 0
	say "installing PyTorch ($TORCH) into .venv. This is the long step and happens once: PyTorch's default build brings the CUDA"
	say "libraries, about 5 GB on disk and 75 s on a fast line. A CPU-only build is much smaller: make ... TORCH=\"torch --index-url URL\""
	read -ra spec <<<"$TORCH"
	$venv -m pip install "${spec[@]}"
	say "installing the package gdn (this checkout, editable), and for tests and demo numpy, pytest and matplotlib: some 15 s"
	$venv -m pip install --editable '.[test,demo]'
	echo "$wanted" >$stamp
fi
if [ "$purpose" = bench ] && ! has $venv transformers; then
	say "installing transformers into .venv, the implementation that the benchmark compares with: some 20 s"
	$venv -m pip install --editable '.[bench]'
fi
