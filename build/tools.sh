#!/bin/bash
# Says what is missing to build libgdn, if something is.
set -u

# at_least WANTED FOUND: is FOUND the same version or a later one?
at_least() { [ "$(printf '%s\n' "$1" "$2" | sort -V | head -n1)" = "$1" ]; }
refuse() { echo "libgdn: $*" >&2; exit 1; }

command -v go >/dev/null || refuse "Go is not on PATH; libgdn needs Go 1.26 or later."
if ! found=$(go env GOVERSION 2>&1); then
	refuse "the go command on PATH cannot work on this module, which needs Go 1.26 or later: $found"
fi
at_least 1.26 "${found#go}" || refuse "$(command -v go) is Go ${found#go}; libgdn needs Go 1.26 or later."

cc=$(go env CC)
command -v "${cc%% *}" >/dev/null || refuse "the C compiler '$cc' is not on PATH; libgdn needs gcc 12 or later (Debian: gcc libc6-dev)."
if $cc --version | head -n1 | grep -qi gcc; then
	found=$($cc -dumpfullversion)
	at_least 12 "$found" || refuse "$cc is gcc $found; the kernels need gcc 12 or later. CC=gcc-12 make ... names another."
fi
