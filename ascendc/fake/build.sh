#!/bin/bash
# Builds the fake CANN libraries into build/out:
#	cann      CANN 9.0 with today's fla-npu
#	cann-old  CANN 8.3 with fla-npu as of August 2026: fewer symbols, other argument lists and layouts
#	cann-asan the first one with AddressSanitizer, when SAN=1
set -eu
cd "$(dirname "$0")"
out=../../build/out
flags="-std=gnu11 -O2 -g -Wall -Wextra -Werror -Wno-missing-field-initializers -fPIC -fvisibility=hidden -shared -pthread"

# library FILE SOURCES AND FLAGS...
library() { gcc $flags $sanitize -DCANN=$cann -DFLA=$fla -Wl,-soname,"$(basename "$1")" -o "$1" "${@:2}"; }

# headers FOLDER SOURCES...: what a package declares, taken from the sources here
headers() {
	mkdir -p "$1"
	cat "${@:2}" | gcc -E -P -I. -DCANN=$cann -DFLA=$fla -x c - | tr '\n' ' ' | grep -oE 'int aclnn[A-Za-z0-9]+GetWorkspaceSize\([^)]*\)' |
		sed -E 's/\bT /const aclTensor */g; s/\bL /const aclIntArray */g; s/Executor \*\*/aclOpExecutor **/; s/\bScalar \*/aclScalar */g; s/\bTensor \*/aclTensor */g; s/\bTensorList \*/aclTensorList */g; s/ {2,}/ /g; s/_Bool/bool/g; s/^int/aclnnStatus/' |
		while read -r line; do
			op=$(sed -E 's/.*aclnn([A-Za-z0-9]+)GetWorkspaceSize.*/\1/' <<<"$line")
			file=$1/aclnn_$(sed -E 's/([a-z0-9])([A-Z])/\1_\2/g' <<<"$op" | tr A-Z a-z).h
			if [ $fla = 1 ] && [ $op = SolveTri ]; then # as shipped: the entry exists and is not declared
				echo 'namespace l0op { const aclTensor *SolveTri(const aclTensor *x, aclOpExecutor *executor); }' >"$file"
				continue
			fi
			{
				echo '#include "aclnn/acl_meta.h"'
				echo "$line;"
				echo "aclnnStatus aclnn$op(void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, aclrtStream stream);"
			} >"$file"
		done
}

build() { # FOLDER CANN FLA SANITIZER-FLAGS
	local folder=$out/.$1 cann=$2 fla=$3 sanitize=$4
	rm -rf "$folder"
	local lib=$folder/lib64 vendor=$folder/opp/vendors/fla_npu_transformer
	mkdir -p "$lib" "$vendor/op_api/lib" "$folder"/{runtime,compiler,opp-alone} # the last three: torch_npu looks whether they are there
	library "$lib/libascendcl.so" control.c memory.c races.c runtime.c client.c
	local with="-L$lib -lascendcl -Wl,-rpath,\$ORIGIN"
	library "$lib/libnnopbase.so" tensor.c op.c $with
	library "$lib/libopapi.so" opapi.c -lm $with -lnnopbase
	library "$vendor/op_api/lib/libcust_opapi.so" fla_gdn.c fla_kda.c fla_other.c -lm -L$lib -lnnopbase -lascendcl '-Wl,-rpath,$ORIGIN/../../../../../lib64'
	headers "$vendor/op_api/include/aclnnop" fla_*.c
	headers "$folder/include/aclnnop" opapi.c
	echo 'load_priority=fla_npu_transformer' >"$folder/opp/vendors/config.ini"
	# Doors to what libascendcl has, and libraries that clients open and take nothing from.
	local door
	for door in libacl_rt libacl_op_compiler; do
		library "$lib/$door.so" -x c /dev/null -Wl,--no-as-needed $with
	done
	[ $cann -lt 900 ] || library "$lib/libacl_rtc.so" rtc.c $with
	library "$lib/libhccl.so" hccl.c $with
	library "$lib/libhcomm.so" -x c /dev/null -Wl,--no-as-needed $with -lhccl # where group calls are looked up
	for door in libge_runner libgraph libacl_tdt_channel; do
		library "$lib/$door.so" -x c /dev/null
	done
	rm -rf "$out/$1" # only now: tests may be running on what was there
	mv "$folder" "$out/$1"
}

build cann 900 2 ""
build cann-old 803 1 ""
[ "${SAN:-}" = "" ] || build cann-asan 900 2 "-fsanitize=address -fno-omit-frame-pointer"
