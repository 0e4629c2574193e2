package ascendc

/*
#include "trampoline.h"
*/
import "C"

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"unsafe"

	"github.com/ebitengine/purego"
)

// opName names an operator of a vendor, by the part between aclnn and GetWorkspaceSize.
type opName struct {
	name string
	from provider
}

type provider int

const (
	stock provider = iota // CANN's own libraries
	fla                   // libcust_opapi.so of flash-linear-attention-npu
)

func (n *opName) symbol() string { return "aclnn" + n.name }

// vendorOp is an operator as it is installed, or the reason why it cannot be called.
type vendorOp struct {
	name           string
	phase1, phase2 uintptr
	letters        string
	variant        string
	err            error
}

// CANN's plain operators that stand between those of the delta rule.
var (
	inplaceCopy = &opName{"InplaceCopy", stock}
	inplaceZero = &opName{"InplaceZero", stock}
	inplaceOne  = &opName{"InplaceOne", stock}
	clampMin    = &opName{"ClampMin", stock}
)

// in finds an operator in the libraries of this process, once.
func (n *opName) in(a *acl) *vendorOp {
	if op, ok := a.ops.Load(n); ok {
		return op.(*vendorOp)
	}
	op := n.find(a)
	a.ops.Store(n, op)
	return op
}

func (n *opName) find(a *acl) *vendorOp {
	op := &vendorOp{name: n.symbol()}
	if n.from == stock {
		op.phase1 = symbol(op.name+"GetWorkspaceSize", a.stock...)
		op.phase2 = symbol(op.name, a.stock...)
		op.letters = stockKnown[n.name]
		switch {
		case len(a.stock) == 0:
			op.err = fmt.Errorf("neither libopapi_math.so nor libopapi.so of CANN %s could be loaded (%v)", a.version, a.stockErr)
		case op.phase1 == 0 || op.phase2 == 0:
			op.err = fmt.Errorf("CANN %s has no %s", a.version, op.name)
		default:
			op.err = n.checkHeader(op.letters)
		}
		return op
	}
	if a.fla == nil {
		op.err = fmt.Errorf("flash-linear-attention-npu is not installed (no libcust_opapi.so below FLA_NPU_OPP_PATH, ASCEND_CUSTOM_OPP_PATH or ASCEND_OPP_PATH)")
		return op
	}
	if a.fla.err != nil {
		op.err = a.fla.err
		return op
	}
	op.phase1, op.phase2 = a.fla.symbol(op.name+"GetWorkspaceSize"), a.fla.symbol(op.name)
	if op.phase1 == 0 || op.phase2 == 0 {
		op.err = fmt.Errorf("%s has no %s", a.fla.library, op.name)
		return op
	}
	d, declared := a.fla.declared[n.name]
	switch {
	case declared:
		var v variant
		v, op.err = match(n.name, d, known[n.name])
		op.letters, op.variant = v.letters, v.name
	case n.name == "SolveTri": // its header declares an inner function only; the entry has had one list
		op.letters = known[n.name][0].letters
	default:
		op.err = fmt.Errorf("no header in %s declares %sGetWorkspaceSize, so its argument list is not known", a.fla.headers, op.name)
	}
	return op
}

var humps = regexp.MustCompile(`([a-z0-9])([A-Z])`)

// checkHeader compares a stock operator's list with the header of the installed CANN, where there is one.
func (n *opName) checkHeader(letters string) error {
	file := "aclnn_" + strings.ToLower(humps.ReplaceAllString(n.name, "${1}_$2")) + ".h"
	for _, home := range homes() {
		folder := filepath.Join(home, "include", "aclnnop")
		if !exists(filepath.Join(folder, file)) {
			continue
		}
		if d, ok := readDeclarations(filepath.Join(folder, file))[n.name]; ok {
			_, err := match(n.name, d, []variant{{letters, ""}})
			return err
		}
	}
	return nil
}

// flaNPU is an installed flash-linear-attention-npu, or why it cannot be used.
type flaNPU struct {
	library, headers string
	handle           uintptr
	declared         declarations
	version          string
	err              error
}

// findFLA looks where fla-npu itself looks. What it finds is opened, and CANN is told where its kernels are: it looks for them by
// ASCEND_CUSTOM_OPP_PATH, not by the library's handle, and does so at its first operator.
func findFLA(a *acl) *flaNPU {
	var roots []string
	for _, name := range []string{"FLA_NPU_OPP_PATH", "ASCEND_CUSTOM_OPP_PATH", "ASCEND_OPP_PATH"} {
		roots = append(roots, strings.FieldsFunc(getenv(name), func(c rune) bool { return c == ':' })...)
	}
	for _, root := range roots {
		vendor := vendorIn(root)
		if vendor == "" {
			continue
		}
		f := &flaNPU{library: filepath.Join(vendor, "op_api/lib/libcust_opapi.so"), headers: filepath.Join(vendor, "op_api/include/aclnnop"), version: "unknown"}
		if alias := filepath.Join(vendor, "op_api/lib/libopapi.so"); exists(alias) {
			f.err = fmt.Errorf("%s would take the place of CANN's own libopapi.so; remove it", alias)
			return f
		}
		if text, err := os.ReadFile(filepath.Join(vendor, "version.info")); err == nil {
			f.version = strings.TrimSpace(string(text))
		}
		announce(vendor, root)
		const noDelete = 0x1000
		var err error
		if f.handle, err = purego.Dlopen(f.library, purego.RTLD_NOW|purego.RTLD_GLOBAL|noDelete); err != nil {
			f.err = fmt.Errorf("%s could not be loaded: %v", f.library, err)
			return f
		}
		f.declared = readDeclarations(filepath.Join(f.headers, "*.h"))
		return f
	}
	return nil
}

// vendorIn finds the vendor's folder below a root: the root itself, the one of fla-npu's name, or the only one with such a library.
func vendorIn(root string) string {
	has := func(dir string) bool { return exists(filepath.Join(dir, "op_api/lib/libcust_opapi.so")) }
	if has(root) {
		return root
	}
	if dir := filepath.Join(root, "vendors/fla_npu_transformer"); has(dir) {
		return dir
	}
	found, _ := filepath.Glob(filepath.Join(root, "vendors/*/op_api/lib/libcust_opapi.so"))
	if len(found) == 1 {
		return filepath.Dir(filepath.Dir(filepath.Dir(found[0])))
	}
	return ""
}

// announce puts folders in front of ASCEND_CUSTOM_OPP_PATH, each once.
func announce(folders ...string) {
	list := []string{}
	for _, f := range append(folders, strings.Split(getenv("ASCEND_CUSTOM_OPP_PATH"), ":")...) {
		if f != "" && !contains(list, f) {
			list = append(list, f)
		}
	}
	setenv("ASCEND_CUSTOM_OPP_PATH", strings.Join(list, ":"))
}

func contains(list []string, s string) bool {
	for _, x := range list {
		if x == s {
			return true
		}
	}
	return false
}

// symbol looks a function up in this library and not in those that it depends on, which have some of the same names.
func (f *flaNPU) symbol(name string) uintptr {
	fn := symbol(name, f.handle)
	if fn != 0 {
		if file := C.gdna_file_of(C.uintptr_t(fn)); file == nil || filepath.Base(C.GoString(file)) != filepath.Base(f.library) {
			return 0
		}
	}
	return fn
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// trampoline calls the first phase of an operator.
func trampoline(fn uintptr, ints *[40]uint64, floats *[8]float64) int32 {
	return int32(C.gdna_call(C.uintptr_t(fn), (*C.uint64_t)(unsafe.Pointer(ints)), (*C.double)(unsafe.Pointer(floats))))
}
