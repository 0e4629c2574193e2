#!/bin/bash
# What must hold before a commit, apart from the tests.
set -eu
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failed=0
bad() { echo "check: $*" >&2; failed=1; }

unformatted=$(gofmt -l capi core include kernels)
[ -z "$unformatted" ] || bad "gofmt would change: $unformatted"
go vet ./... || bad "go vet complains"

generated="include/gdn.h capi/ops_gen.c kernels/cpu/ops_gen.h python/gdn/_ops.py"
before=$(cksum $generated)
go run ./core/opgen
[ "$before" = "$(cksum $generated)" ] || bad "generated files were not current; they are now: make gen"

exports=$(nm -D --defined-only build/out/libgdn.so | awk '$2 != "A" { print $3 }')
strange=$(grep -v '^gdn_' <<<"$exports" || true)
[ -n "$exports" ] || bad "libgdn.so exports nothing"
[ -z "$strange" ] || bad "libgdn.so exports more than gdn_*:" $strange
for name in $(grep -oE '\bgdn_[a-z0-9_]+\(' include/gdn.h | grep -v TAPE | tr -d '(' | sort -u); do
	grep -q "^$name@@LIBGDN_0$" <<<"$exports" || bad "gdn.h declares $name, libgdn.so does not export it"
done
readelf -d build/out/libgdn.so | grep -q 'SONAME.*\[libgdn\.so\.0\]' || bad "the soname is not libgdn.so.0"

echo '#include "gdn.h"' >"$scratch/header.c"
cp "$scratch/header.c" "$scratch/header.cpp"
strict="-Wall -Wextra -pedantic -Werror -fsyntax-only -Iinclude"
gcc -std=c99 $strict "$scratch/header.c" || bad "gdn.h does not compile alone as C99"
g++ -std=c++11 $strict "$scratch/header.cpp" || bad "gdn.h does not compile alone as C++11"

dirty=$(git status --porcelain)
[ -z "$dirty" ] || bad "the tree is not clean:"$'\n'"$dirty"

[ $failed = 0 ] && echo "check: all good"
exit $failed
