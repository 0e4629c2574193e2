#!/bin/bash
# Builds libgdn.so for arm64 and runs the Go suite under qemu. Its C programs (capi) run on the build machine's own architecture only.
set -eu
cd "$(dirname "$0")/.."
for tool in aarch64-linux-gnu-gcc qemu-aarch64-static; do
	if ! command -v $tool >/dev/null; then
		echo "libgdn: $tool is not on PATH; make arm64 needs Debian's gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user-static." >&2
		exit 1
	fi
done
export GOOS=linux GOARCH=arm64 CGO_ENABLED=1 CC=aarch64-linux-gnu-gcc
mkdir -p build/out/arm64
go build -buildmode=c-shared -trimpath \
	-ldflags "-s -w -extldflags \"-Wl,--version-script=$PWD/capi/gdn.map -Wl,-soname,libgdn.so.0\"" -o build/out/arm64/libgdn.so ./capi
ls -l build/out/arm64/libgdn.so
go test -short -timeout 60m -exec 'qemu-aarch64-static -L /usr/aarch64-linux-gnu' ./core/... ./kernels/...
