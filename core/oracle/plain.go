package oracle

import "maps"

// Plain is one call of an operator that stands for itself, with the letters and numbers of the table.
type Plain struct {
	Op      string
	Size    map[string]int64 // of the letters, and the derived ones
	Cu      []int            // offsets of packed sequences; nil: B sequences of T tokens
	Numbers map[string]float64
	In      Tensors // the inputs that are given, as they were rounded; offsets are in Cu
}

// references are the operators by their names, those of each family in its own file.
var references = merged(gateReferences, convReferences, stages, summaries, frameReferences, pagedReferences)

func merged(families ...map[string]func(p *Plain) Tensors) map[string]func(p *Plain) Tensors {
	all := map[string]func(p *Plain) Tensors{}
	for _, f := range families {
		maps.Copy(all, f)
	}
	return all
}

// Run returns the operator's outputs.
func (p *Plain) Run() Tensors {
	f := references[p.Op]
	if f == nil {
		panic("oracle: no reference for " + p.Op)
	}
	return f(p)
}

// Sequences returns the first row, counted over B and T, and the length of each sequence.
func (p *Plain) Sequences() (first, length []int) {
	return sequences(int(p.Size["B"]), int(p.Size["T"]), p.Cu)
}
