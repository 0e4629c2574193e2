package core

import (
	"math/bits"
	"strconv"
)

// expr is a Derived expression in reverse Polish form: sizes and constants push, operators take two.
type expr []instr

type instr struct {
	op    byte // 's' a size, 'n' an integer of the call, 'c' a constant, '+', '*', '/'
	value int64
}

// maxSize bounds every size and every product of sizes. No address space is wider, and sums of a few numbers of bytes stay an int64.
const maxSize = 1 << 57

// mul multiplies two sizes; ok is false where the product is beyond maxSize.
func mul(a, b int64) (product int64, ok bool) {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	return int64(lo), hi == 0 && lo <= maxSize
}

// eval is false where a size is too large to be one, or a divisor is 0.
func (e expr) eval(sizes *[MaxSizes]int64, ints *[MaxNumbers]int64) (int64, bool) {
	var stack [16]int64
	top := -1
	for _, in := range e {
		switch in.op {
		case 's', 'n', 'c':
			top++
			stack[top] = in.value
			if in.op == 's' {
				stack[top] = sizes[in.value]
			} else if in.op == 'n' {
				stack[top] = ints[in.value]
			}
			continue
		}
		a, b, ok := stack[top-1], stack[top], true
		top--
		switch in.op {
		case '+':
			a += b // both at most maxSize
			ok = a <= maxSize
		case '*':
			a, ok = mul(a, b)
		case '/':
			if ok = b != 0; ok {
				a /= b
			}
		}
		if !ok {
			return 0, false
		}
		stack[top] = a
	}
	return stack[0], true
}

// parseExpr understands sums of products of names, integers and parentheses; // is integer division, as in Python. A wrong expression
// is a wrong table, hence the panic.
func parseExpr(text string, names []string, numbers []NumberArg) expr {
	p := exprParser{text: text, names: names, numbers: numbers}
	p.sum()
	if p.pos != len(text) || p.depth > 16 {
		panic("core: size expression not understood: " + text)
	}
	return p.out
}

type exprParser struct {
	text       string
	pos        int
	names      []string
	numbers    []NumberArg
	out        expr
	now, depth int // values on the stack here, and at most
}

func (p *exprParser) accept(token string) bool {
	for p.pos < len(p.text) && p.text[p.pos] == ' ' {
		p.pos++
	}
	if n := p.pos + len(token); n <= len(p.text) && p.text[p.pos:n] == token {
		p.pos = n
		return true
	}
	return false
}

func (p *exprParser) sum() {
	for p.product(); p.accept("+"); p.emit('+', 0) {
		p.product()
	}
}

func (p *exprParser) product() {
	p.factor()
	for {
		switch {
		case p.accept("*"):
			p.factor()
			p.emit('*', 0)
		case p.accept("//"):
			p.factor()
			p.emit('/', 0)
		default:
			return
		}
	}
}

func (p *exprParser) factor() {
	if p.accept("(") {
		p.sum()
		if !p.accept(")") {
			panic("core: unbalanced size expression: " + p.text)
		}
		return
	}
	start := p.pos
	for p.pos < len(p.text) && isWord(p.text[p.pos]) {
		p.pos++
	}
	word := p.text[start:p.pos]
	if n, err := strconv.ParseInt(word, 10, 64); err == nil {
		p.emit('c', n)
		return
	}
	for i := range p.numbers {
		if n := &p.numbers[i]; n.Name == word && !n.Float && n.Min >= 0 && n.Max <= maxSize {
			p.emit('n', int64(i))
			return
		}
	}
	p.emit('s', int64(mustIndex(p.names, word, p.text)))
}

func (p *exprParser) emit(op byte, value int64) {
	p.out = append(p.out, instr{op, value})
	if op == 's' || op == 'n' || op == 'c' {
		p.now++
		p.depth = max(p.depth, p.now)
	} else {
		p.now--
	}
}

func isWord(c byte) bool {
	return c == '_' || '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
}

func mustIndex(names []string, name, where string) int {
	for i, n := range names {
		if n == name {
			return i
		}
	}
	panic("core: " + strconv.Quote(name) + " is unknown in " + strconv.Quote(where))
}
