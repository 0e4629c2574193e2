package ascendc

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// C cannot tell argument lists apart: the same symbol has had several. So before an operator of fla-npu is first called, its declaration
// is read from the header that was installed with it and reduced to one letter an argument:
//
//	T tensor   L list of integers in host memory   i int64   d double   f float   b bool   s string   l list of tensors   c scalar
//	e enum or small integer
//
// The letters of each list that this package can fill are below. An unknown list is refused, never guessed at.

// variant is one argument list of an operator, under the name that the code that calls it switches on.
type variant struct {
	letters string
	name    string
}

// t writes letters from run lengths: t("T7 f T2") is TTTTTTTfTT.
func t(runs string) string {
	var b strings.Builder
	for _, r := range strings.Fields(runs) {
		n := 1
		if len(r) > 1 {
			fmt.Sscan(r[1:], &n)
		}
		b.WriteString(strings.Repeat(r[:1], n))
	}
	return b.String()
}

// known holds the argument lists of fla-npu's operators, without the two closing out-pointers.
var known = map[string][]variant{
	"ChunkLocalCumsum":          {{t("T L2 i b d b s T"), ""}},
	"ChunkScaledDotKkt":         {{t("T3 L2 i T"), ""}},
	"SolveTri":                  {{t("T L2 s T"), ""}},
	"RecomputeWUFwd":            {{t("T6 L2 i T2"), ""}},
	"ChunkGatedDeltaRuleFwdH":   {{t("T6 b i L2 b T3"), ""}},
	"ChunkFwdO":                 {{t("T5 L2 d i T"), "old"}, {t("T5 L2 d i b2 s T"), "new"}},
	"ChunkBwdDvLocal":           {{t("T6 L2 d i T"), ""}},
	"ChunkGatedDeltaRuleBwdDhu": {{t("T9 L2 d i b T3"), "old"}, {t("T9 L2 d i b2 T3"), "new"}},
	"ChunkBwdDqkwg":             {{t("T8 L2 T2 f i b2 T4"), ""}},
	"PrepareWyReprBwdDa":        {{t("T7 L2 i T"), ""}},
	"PrepareWyReprBwdFull":      {{t("T8 L2 i T4"), ""}},
	"ChunkGatedDeltaRuleFwd":    {{t("T8 L2 s d i b4 T10"), "new"}, {t("T8 L2 s d i b3 T10"), "without norm"}},
	"ChunkGatedDeltaRuleBwd":    {{t("T14 L2 s d i b5 T8"), ""}},
	"ChunkFwdH":                 {{t("T6 b i b L2 b2 T3"), ""}},
	"ChunkKdaFwd":               {{t("T8 L2 s d i b d b2 T11"), ""}},
	"ChunkKdaFwdPrepare":        {{t("T7 L2 s d i d b5 d b T13"), ""}},
	"ChunkKdaFwdFinalize":       {{t("T4 L2 s b T"), ""}},
	"ChunkKdaBwdPrepare":        {{t("T4 L2 d i b T3"), ""}},
	"ChunkKdaBwdFinalize":       {{t("T17 L2 d2 i b4 T7"), ""}},
	"RecurrentGatedDeltaRule":   {{t("T10 f T"), ""}},
	"RecurrentKda":              {{t("T11 s d b7 d b T2"), ""}},
	"CausalConv1d":              {{t("T4 L4 i4 T"), "old"}, {t("T8 L4 s i5 T"), "new"}},
	"CausalConv1dBwd":           {{t("T6 L i s T4"), ""}},
	"PreProcessFwdKernelMerged": {{t("T7 L i T"), ""}},
	"PreProcessBwdKernelMerged": {{t("T7 L d i T"), ""}},
	"MergeFwdBwdKernel":         {{t("T2 i2 b2"), ""}},
}

// stockKnown holds those of CANN's own operators. Each has had one list, which torch_npu's own callers confirm, so a missing header (a
// machine with CANN's run time only) is no reason to refuse; a header that says otherwise is.
var stockKnown = map[string]string{
	"ChunkGatedDeltaRule":     t("T7 f T2"),
	"RecurrentGatedDeltaRule": t("T10 f T"),
	"InplaceCopy":             t("T2"),
	"InplaceZero":             t("T"),
	"InplaceOne":              t("T"),
	"Add":                     t("T2 c T"),
	"Sub":                     t("T2 c T"),
	"Mul":                     t("T3"),
	"Div":                     t("T3"),
	"Muls":                    t("T c T"),
	"ClampMin":                t("T c T"),
	"BatchMatMul":             t("T3 e"),
}

// declarations finds each aclnn…GetWorkspaceSize that the headers of a folder declare.
type declarations map[string]declaration

type declaration struct{ text, letters, file string }

var (
	comments  = regexp.MustCompile(`(?s)/\*.*?\*/|//[^\n]*`)
	directive = regexp.MustCompile(`(?m)^[ \t]*#(?:[^\n]*\\\n)*[^\n]*$`)
	phaseOne  = regexp.MustCompile(`\baclnn(\w+)GetWorkspaceSize\s*\(([^)]*)\)`)
	spaces    = regexp.MustCompile(`\s+`)
	words     = regexp.MustCompile(`\w+|\*`)
)

// readDeclarations reads the headers that a pattern names; none declare nothing.
func readDeclarations(pattern string) declarations {
	found := declarations{}
	files, _ := filepath.Glob(pattern)
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		source := directive.ReplaceAllString(comments.ReplaceAllString(string(text), " "), "")
		for _, m := range phaseOne.FindAllStringSubmatch(source, -1) {
			found[m[1]] = declaration{strings.TrimSpace(spaces.ReplaceAllString(m[0], " ")), reduce(m[2]), file}
		}
	}
	return found
}

// reduce turns a parameter list into letters, without the closing uint64_t *workspaceSize, aclOpExecutor **executor. A parameter that is
// none of the known kinds, and a list that does not end so, give a '?', which matches nothing.
func reduce(parameters string) string {
	list := strings.Split(parameters, ",")
	var letters strings.Builder
	for i, p := range list {
		kind, stars := "", 0
		for _, w := range words.FindAllString(p, -1) {
			switch {
			case w == "*":
				stars++
			case w == "const" || w == "struct":
			case kind == "":
				kind = w
			}
		}
		closing := i - (len(list) - 2)
		switch {
		case closing == 0 && kind == "uint64_t" && stars == 1, closing == 1 && kind == "aclOpExecutor" && stars == 2:
		case closing >= 0:
			letters.WriteByte('?')
		default:
			letters.WriteByte(letter(kind, stars))
		}
	}
	return letters.String()
}

func letter(kind string, stars int) byte {
	switch {
	case stars == 1 && kind == "aclTensor":
		return 'T'
	case stars == 1 && kind == "aclIntArray":
		return 'L'
	case stars == 1 && kind == "aclTensorList":
		return 'l'
	case stars == 1 && kind == "aclScalar":
		return 'c'
	case stars == 1 && kind == "char":
		return 's'
	case stars > 0:
		return '?'
	}
	switch kind {
	case "int64_t":
		return 'i'
	case "int8_t", "int32_t", "int", "aclDataType":
		return 'e'
	case "double":
		return 'd'
	case "float":
		return 'f'
	case "bool", "_Bool":
		return 'b'
	}
	return '?'
}

// match finds the variant that a header declares.
func match(op string, d declaration, variants []variant) (variant, error) {
	for _, v := range variants {
		if v.letters == d.letters {
			return v, nil
		}
	}
	return variant{}, fmt.Errorf("%s declares %s, an argument list that this version of gdn does not know (%s)", d.file, d.text, d.letters)
}
