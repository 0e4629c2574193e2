// Package core holds what every backend shares: the table of operators, the decoder that turns a caller's argument struct into a
// checked Call, and the Backend interface.
package core

import (
	"slices"
	"sync"
)

// Role says how an operator uses a tensor.
type Role uint8

const (
	In     Role = iota // required input
	OptIn              // input, may be NULL
	Out                // required output
	OptOut             // output, NULL if not wanted
	InOut              // required, read and written in place
)

// Written tells whether the operator writes to such a tensor.
func (r Role) Written() bool { return r == Out || r == OptOut || r == InOut }

// Required tells whether such a tensor must be given.
func (r Role) Required() bool { return r == In || r == Out || r == InOut }

// Rule says which dtypes a tensor may have.
type Rule uint8

const (
	Float   Rule = iota // float32, bfloat16, float16 or float64, independent of the other tensors
	Io                  // float32, bfloat16 or float16; float64 exactly if the first tensor of the op is float64
	Acc                 // float32; float64 exactly if the first tensor of the op is float64
	Same                // the dtype of the tensor named in Like
	Integer             // int32 or int64
)

// Op is one row of the table: the C struct, the C entry, the Python binding and all checks derive from it.
type Op struct {
	Name    string // "kda_fwd": the symbol is gdn_kda_fwd, the torch op gdn::kda_fwd
	Doc     string
	Tensors []TensorArg
	Numbers []NumberArg
	Derived []Derived
	Check   func(*Call) error // relations that no shape expresses; nil if there are none

	once sync.Once // guards plan, which Decode makes at the operator's first call
	plan *plan
}

// TensorArg is one tensor of an operator.
type TensorArg struct {
	Name string
	Role Role
	Rule Rule
	Like string // with Rule Same: the tensor whose dtype this one has
	// Dims names the sizes, outermost first: "B T HV K". A letter means one number throughout the call; a letter in brackets may be
	// missing with its dimension ("B T HV [V]"); "N+1" binds N to one less than the size; a derived size is only checked.
	Dims  string
	State bool   // the last two dimensions are exchanged where the number state_v_first is not 0
	Host  bool   // stays in host memory whatever the device; its values are checked as sequence offsets
	With  string // OptOut: may be given only where this input is given
	Want  string // OptOut: the Python keyword that asks for it; without one it is made wherever With is given
	Doc   string
}

// NumberArg is one scalar of an operator: a double, or an int64 with its range.
type NumberArg struct {
	Name     string
	Float    bool
	Min, Max int64 // for integers, inclusive
	Doc      string
}

// Derived is a size that follows from others and from the call's integers; Expr knows + * // ( ) and constants, and is Python as it stands.
type Derived struct{ Name, Expr string }

// Limits of a Call. They are array sizes of a fixed struct, so that decoding allocates nothing.
const (
	MaxTensors = 32
	MaxNumbers = 12
	MaxSizes   = 24
	MaxRank    = 5
)

// Letters lists every size letter; a Call keeps the sizes in this order and so do the kernels. N is the number of sequences: the length
// of cu_seqlens less one, or B without cu_seqlens. D counts channels, W taps of a filter, P maps or slots, R rows of another kind.
var Letters = []string{"B", "T", "H", "HV", "K", "V", "N", "D", "W", "P", "R"}

// Ops is the table, by families.
var Ops = slices.Concat(gdnOps, kdaOps, stageOps, summaryOps, gateOps, convOps, pagedOps, frameOps)
