// Package include embeds the public headers. Go's build cache does not watch headers outside a package's folder; a cgo package that
// imports this one is built anew when they change.
package include

import _ "embed"

// GDN is gdn.h, the library's interface.
//
//go:embed gdn.h
var GDN string

// DLPack is dlpack.h, as DLPack publishes it.
//
//go:embed dlpack/dlpack.h
var DLPack string
