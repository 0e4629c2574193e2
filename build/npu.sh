#!/bin/bash
# The Python suite's NPU part, on the fake CANN of ascendc/fake, with the released torch_npu. Its environment is made once and kept.
# usage: build/npu.sh [pytest arguments]
# NPU=2.8  with the older pair of versions
# SAN=1    on the fake built with AddressSanitizer
set -eu
cd "$(dirname "$0")/.."

# Versions of torch and torch-npu that fit together. From 2.10 on torch-npu needs a build of torch without CUDA, which the registry lacks.
case ${NPU:-2.9} in
2.9) torch=2.9.0 torch_npu=2.9.0.post9 venv=.venv-npu ;;
2.8) torch=2.8.0 torch_npu=2.8.0 venv=.venv-npu-2.8 ;;
*) echo "libgdn: NPU=$NPU is not known; 2.9 and 2.8 are" >&2; exit 1 ;;
esac

stamp=$venv/.gdn-ready
wanted="torch $torch, torch-npu $torch_npu"
if [ "$(cat $stamp 2>/dev/null)" != "$wanted" ]; then
	echo "== making $venv with $wanted: some 7 GB and two to five minutes, once"
	python3 -m venv --clear $venv
	$venv/bin/python -m pip install --quiet torch==$torch numpy pyyaml pytest
	$venv/bin/python -m pip install --quiet --no-deps torch-npu==$torch_npu # its requirements pin packages that only its tools need
	echo "$wanted" >$stamp
fi

# fla-npu by a path of its own: below ASCEND_OPP_PATH, torch_npu would take its aclnnRecurrentGatedDeltaRule for CANN's.
cann=$PWD/build/out/cann${SAN:+-asan}
export LD_LIBRARY_PATH=$cann/lib64 ASCEND_HOME_PATH=$cann ASCEND_OPP_PATH=$cann/opp-alone FLA_NPU_OPP_PATH=$cann/opp PYTHONPATH=$PWD/python
export GDN_FAKE_CANN=$cann
if [ -n "${SAN:-}" ]; then # torch itself is not clean of leaks; its handlers come before ASan's
	export LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0:handle_segv=0
fi
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1
exec $venv/bin/python -m pytest -o testpaths=python/tests_npu "$@"
