// The operators of frame GDN: arguments, and how the work is cut into units.
enum { PADDED_MOST = 512, TOKENS = 128 }; // the largest K or V; tokens that share a walk over the matrices

INL int pad_to(int n, int to) { return (n + to - 1) / to * to; }
INL uint64_t flush_denormals_in(size_t size) { return size == 4 ? flush_denormals() : 0; }

// [B T rows cols] at head b and frame t, [B rows cols] at head b
INL view matrix(const gdnk_tensor *t, int64_t b, int64_t i) {
	return (view){(char *)t->data + (b * t->stride[0] + i * t->stride[1]) * size_of(t->dtype), t->dtype, t->stride[2], t->stride[3]};
}
INL view state_rows(const gdnk_tensor *t, int64_t b) {
	return (view){(char *)t->data + b * t->stride[0] * size_of(t->dtype), t->dtype, t->stride[1], t->stride[2]};
}
// Asks for a matrix while another is worked on.
INL void ahead(prefetch *q, view v, int rows, int cols) {
	if (v.row == cols) pf_rows(q, v, 1, rows * cols);
	else pf_rows(q, v, rows, cols);
}
// Tokens [B T R H ..] of a frame and head: rows are tokens; [B H T ..] there; one number of [B T H]
INL view frame_tokens(const gdnk_tensor *t, int64_t b, int64_t i, int64_t h) {
	const int64_t *s = t->stride;
	return (view){(char *)t->data + (b * s[0] + i * s[1] + h * s[3]) * size_of(t->dtype), t->dtype, s[2], t->rank == 5 ? s[4] : 0};
}
INL view frame_matrix(const gdnk_tensor *t, int64_t b, int64_t h, int64_t i) {
	const int64_t *s = t->stride;
	return (view){(char *)t->data + (b * s[0] + h * s[1] + i * s[2]) * size_of(t->dtype), t->dtype, s[3], s[4]};
}
INL view frame_vector(const gdnk_tensor *t, int64_t b, int64_t h, int64_t i) {
	const int64_t *s = t->stride;
	return (view){(char *)t->data + (b * s[0] + h * s[1] + i * s[2]) * size_of(t->dtype), t->dtype, 0, s[3]};
}
INL double number_of(const gdnk_tensor *t, int64_t b, int64_t i, int64_t h) {
	return ld1((const char *)t->data, t->dtype, b * t->stride[0] + i * t->stride[1] + h * t->stride[2]);
}
static void set_number_of(const gdnk_tensor *t, int64_t b, int64_t i, int64_t h, double x) {
	st1((char *)t->data, t->dtype, b * t->stride[0] + i * t->stride[1] + h * t->stride[2], x);
}

// One stream of states, in right form. z is the same with V = 1 and its matrices transposed; absent tensors have dtype 0.
typedef struct chain {
	gdnk_tensor W, U, S, S0, ST, M, dS, dST, dM, dW, dU, dS0;
	int64_t B, T, K, V, rows, active;
	int reverse, exclusive;
	int merge;             // W are composites, which may have overflowed where nothing meets them
	int rescan;            // the backward computes the states itself
	int stream;            // outputs do not fit the caches
	int bwd;
	int64_t blocks, block; // units a head, rows a unit
	const struct chain *z; // what goes along in the same units
} chain;

typedef struct {
	gdnk_tensor k, v, beta, decay, kz, W, U, Wz, uz, dW, dU, dWz, duz, dk, dv, dbeta, ddecay, dkz; // k, dk, kz, dkz: q and qz in the projection
	gdnk_tensor S, z, qz, num, den, dnum, dden, dS, dz;
	int64_t B, T, R, H, K, V;
	int stream;
} tokens;

#define REAL float
#define FN(name) name##_frame32
#include "dense.h"
#include "frame_scan.h"
#include "frame_tokens.h"
#undef REAL
#undef FN
#define REAL double
#define FN(name) name##_frame64
#include "dense.h"
#include "frame_scan.h"
#include "frame_tokens.h"
#undef REAL
#undef FN
#undef VL
#undef VLD
#undef VST
#undef TYPE

static gdnk_tensor swapped(gdnk_tensor t, int i, int j) {
	const int64_t n = t.shape[i], s = t.stride[i];
	t.shape[i] = t.shape[j], t.stride[i] = t.stride[j];
	t.shape[j] = n, t.stride[j] = s;
	return t;
}
// A vector as a matrix of one row
static gdnk_tensor as_row(gdnk_tensor t) {
	if (!t.dtype) return t;
	const int last = t.rank - 1;
	t.shape[t.rank] = t.shape[last], t.stride[t.rank] = t.stride[last];
	t.shape[last] = 1, t.stride[last] = 0;
	t.rank++;
	return t;
}
static int coarse(const gdnk_tensor *t) { return size_of(t->dtype) == 2; }

// The two streams of a call. Their units run side by side, or, where a unit is a whole head and z a matter of vectors, as one.
typedef struct {
	chain c;
	void (*run)(void *, int64_t, char *);
	int64_t units, scratch;
} stream;
static void stream_unit(void *ctx, int64_t unit, char *scratch) {
	stream *s = ctx;
	if (unit >= s->units) unit -= s++->units;
	s->run(&s->c, unit, scratch);
}
static int larger_than_caches(const chain *c) { return tensor_bytes(&c->W) + tensor_bytes(&c->S) + tensor_bytes(&c->dW) + tensor_bytes(&c->dU) >= STREAM_BYTES; }
// By matrix products. Rows of a state are independent, so a head is cut where there are few for the threads; its W is then read by each.
static stream by_products(chain c) {
	const int64_t threads = gdnk_get_num_threads();
	const int wide = c.W.dtype == GDNK_F64;
	c.rows = c.rows ? c.rows : c.V;
	c.stream = larger_than_caches(&c);
	c.blocks = 1;
	if (!c.dW.dtype && c.B && c.B % threads && c.B < 4 * threads) c.blocks = (4 * threads + c.B - 1) / c.B;
	if (c.blocks > (c.rows + 15) / 16) c.blocks = (c.rows + 15) / 16;
	c.block = pad_to((c.rows + c.blocks - 1) / c.blocks, 8);
	c.blocks = (c.rows + c.block - 1) / c.block;
	return (stream){c, c.bwd ? (wide ? scan_bwd_frame64 : scan_bwd_frame32) : wide ? scan_fwd_frame64 : scan_fwd_frame32, c.B * c.blocks,
		wide ? scan_scratch_frame64(&c) : scan_scratch_frame32(&c)};
}
// By products of a matrix and a vector
static stream by_vectors(chain c) {
	const int wide = c.W.dtype == GDNK_F64;
	c.stream = larger_than_caches(&c);
	return (stream){c, wide ? vector_unit_frame64 : vector_unit_frame32, c.B, wide ? vector_scratch_frame64(&c, c.bwd) : vector_scratch_frame32(&c, c.bwd)};
}
static int run_streams(stream s[2], int two) {
	if (!two) s[1] = (stream){0};
	else if (s[0].c.blocks == 1 && (s[1].run == vector_unit_frame32 || s[1].run == vector_unit_frame64)) {
		s[0].c.z = &s[1].c, s[0].scratch += s[1].scratch, s[1].units = 0;
	}
	return gdnk_parallel(s[0].units + s[1].units, s[0].scratch > s[1].scratch ? s[0].scratch : s[1].scratch, stream_unit, s);
}

#define SIZES .B = c->size[SZ_B], .T = c->size[SZ_T], .K = c->size[SZ_K]
#define DIRECTION(op) .active = c->size[SZ_T] - INT(op, padding), .reverse = INT(op, reverse)

static int op_frame_fwd(const gdnk_call *c) {
#define GIVEN(name) TENSOR(frame_fwd, name)
	const chain kv = {SIZES, DIRECTION(frame_fwd), .exclusive = INT(frame_fwd, exclusive), .V = c->size[SZ_V], .W = GIVEN(W), .U = GIVEN(U),
		.S0 = GIVEN(initial_state), .S = GIVEN(S), .ST = GIVEN(final_state)};
	chain z = kv;
	z.V = 1, z.W = GIVEN(Wz), z.U = as_row(GIVEN(uz)), z.S0 = as_row(GIVEN(initial_z)), z.S = as_row(GIVEN(z)), z.ST = as_row(GIVEN(final_z));
	will_write(&GIVEN(S));
	stream s[2] = {by_products(kv), by_vectors(z)};
	return run_streams(s, z.W.dtype != 0);
#undef GIVEN
}
static int op_frame_bwd(const gdnk_call *c) {
#define GIVEN(name) TENSOR(frame_bwd, name)
	const chain kv = {SIZES, DIRECTION(frame_bwd), .bwd = 1, .exclusive = INT(frame_bwd, exclusive), .V = c->size[SZ_V], .W = GIVEN(W), .U = GIVEN(U), .S = GIVEN(S),
		.S0 = GIVEN(initial_state), .dS = GIVEN(dS), .dST = GIVEN(dfinal_state), .dW = GIVEN(dW), .dU = GIVEN(dU), .dS0 = GIVEN(dinitial_state),
		.rescan = coarse(&GIVEN(S)) && GIVEN(U).dtype};
	chain z = kv;
	z.V = 1, z.W = GIVEN(Wz), z.U = as_row(GIVEN(uz)), z.S = as_row(GIVEN(z)), z.S0 = as_row(GIVEN(initial_z)), z.dS = as_row(GIVEN(dz));
	z.dST = as_row(GIVEN(dfinal_z)), z.dW = GIVEN(dWz), z.dU = as_row(GIVEN(duz)), z.dS0 = as_row(GIVEN(dinitial_z));
	z.rescan = coarse(&GIVEN(z)) && GIVEN(uz).dtype;
	will_write(&GIVEN(dW)), will_write(&GIVEN(dU)), will_write(&GIVEN(dWz));
	stream s[2] = {by_products(kv), by_vectors(z)};
	return run_streams(s, z.W.dtype != 0);
#undef GIVEN
}
static int op_frame_pullback(const gdnk_call *c) {
#define GIVEN(name) TENSOR(frame_pullback, name)
	const chain kv = {SIZES, DIRECTION(frame_pullback), .bwd = 1, .exclusive = INT(frame_pullback, exclusive), .V = c->size[SZ_V], .W = GIVEN(W), .dS = GIVEN(dS),
		.dS0 = GIVEN(dinitial_state)};
	chain z = kv;
	z.V = 1, z.W = GIVEN(Wz), z.dS = as_row(GIVEN(dz)), z.dS0 = as_row(GIVEN(dinitial_z));
	stream s[2] = {by_products(kv), by_vectors(z)};
	return run_streams(s, z.W.dtype && z.dS0.dtype);
#undef GIVEN
}
static int op_frame_summary_fwd(const gdnk_call *c) {
#define GIVEN(name) TENSOR(frame_summary_fwd, name)
	chain kv = {SIZES, DIRECTION(frame_summary_fwd), .V = c->size[SZ_V], .W = GIVEN(W), .U = GIVEN(U), .ST = GIVEN(h), .M = GIVEN(M)}, z = kv;
	z.V = 1, z.W = GIVEN(Wz), z.U = as_row(GIVEN(uz)), z.ST = as_row(GIVEN(hz)), z.M = GIVEN(Mz);
	if (z.W.dtype) z.W = swapped(z.W, 2, 3);
	if (z.M.dtype) z.M = swapped(z.M, 1, 2);
	kv.rows = kv.V + (kv.M.dtype ? kv.K : 0), z.rows = 1 + (z.M.dtype ? z.K : 0);
	stream s[2] = {by_products(kv), by_products(z)};
	return run_streams(s, z.W.dtype != 0);
#undef GIVEN
}
static int op_frame_summary_bwd(const gdnk_call *c) {
#define GIVEN(name) TENSOR(frame_summary_bwd, name)
	chain kv = {SIZES, DIRECTION(frame_summary_bwd), .bwd = 1, .V = c->size[SZ_V], .W = GIVEN(W), .U = GIVEN(U), .dST = GIVEN(dh), .dM = GIVEN(dM), .dW = GIVEN(dW), .dU = GIVEN(dU)}, z = kv;
	z.V = 1, z.W = GIVEN(Wz), z.U = as_row(GIVEN(uz)), z.dST = as_row(GIVEN(dhz)), z.dM = GIVEN(dMz), z.dW = GIVEN(dWz), z.dU = as_row(GIVEN(duz));
	if (z.W.dtype) z.W = swapped(z.W, 2, 3);
	if (z.dM.dtype) z.dM = swapped(z.dM, 1, 2);
	if (z.dW.dtype) z.dW = swapped(z.dW, 2, 3);
	kv.rows = kv.V + kv.K, z.rows = 1 + z.K, kv.rescan = z.rescan = 1;
	stream s[2] = {by_products(kv), by_products(z)};
	return run_streams(s, z.W.dtype != 0);
#undef GIVEN
}
// Composites come as gathered, the parts outermost.
static gdnk_tensor part_inside(gdnk_tensor t) { return t.dtype ? swapped(t, 0, 1) : t; }
static int op_frame_merge_fwd(const gdnk_call *c) {
#define GIVEN(name) TENSOR(frame_merge_fwd, name)
	const chain kv = {SIZES, .active = c->size[SZ_T], .reverse = INT(frame_merge_fwd, reverse), .merge = 1, .V = c->size[SZ_V], .W = part_inside(GIVEN(M)),
		.U = part_inside(GIVEN(h)), .S0 = GIVEN(initial_state), .S = part_inside(GIVEN(S))};
	chain z = kv;
	z.V = 1, z.W = part_inside(GIVEN(Mz)), z.U = as_row(part_inside(GIVEN(hz))), z.S0 = as_row(GIVEN(initial_z)), z.S = as_row(part_inside(GIVEN(z)));
	if (z.W.dtype) z.W = swapped(z.W, 2, 3);
	stream s[2] = {by_products(kv), by_products(z)};
	return run_streams(s, z.W.dtype != 0);
#undef GIVEN
}
static int op_frame_merge_bwd(const gdnk_call *c) {
#define GIVEN(name) TENSOR(frame_merge_bwd, name)
	const chain kv = {SIZES, .active = c->size[SZ_T], .reverse = INT(frame_merge_bwd, reverse), .merge = 1, .bwd = 1, .V = c->size[SZ_V], .W = part_inside(GIVEN(M)),
		.S = part_inside(GIVEN(S)), .S0 = GIVEN(initial_state), .dS = part_inside(GIVEN(dS)), .dW = part_inside(GIVEN(dM)), .dU = part_inside(GIVEN(dh)),
		.dS0 = GIVEN(dinitial_state)};
	chain z = kv;
	z.V = 1, z.W = part_inside(GIVEN(Mz)), z.S = as_row(part_inside(GIVEN(z))), z.S0 = as_row(GIVEN(initial_z)), z.dS = as_row(part_inside(GIVEN(dz)));
	z.dW = part_inside(GIVEN(dMz)), z.dU = as_row(part_inside(GIVEN(dhz))), z.dS0 = as_row(GIVEN(dinitial_z));
	if (z.W.dtype) z.W = swapped(z.W, 2, 3);
	if (z.dW.dtype) z.dW = swapped(z.dW, 2, 3);
	stream s[2] = {by_products(kv), by_products(z)};
	return run_streams(s, z.W.dtype != 0);
#undef GIVEN
}

#define TOKENS_OF(op) .B = c->size[SZ_B], .T = c->size[SZ_T], .R = c->size[SZ_R], .H = c->size[SZ_H], .K = c->size[SZ_K], .V = c->size[SZ_V]
static int run_tokens(tokens *s, const gdnk_tensor *largest, void (*narrow)(void *, int64_t, char *), void (*wide)(void *, int64_t, char *)) {
	s->stream = tensor_bytes(largest) >= STREAM_BYTES;
	will_write(largest);
	const int64_t units = s->B * s->H * s->T;
	return s->k.dtype == GDNK_F64 ? gdnk_parallel(units, tokens_scratch_frame64(s), wide, s) : gdnk_parallel(units, tokens_scratch_frame32(s), narrow, s);
}
static int op_frame_build_fwd(const gdnk_call *c) {
#define GIVEN(name) .name = TENSOR(frame_build_fwd, name)
	tokens s = {TOKENS_OF(frame_build_fwd), GIVEN(k), GIVEN(v), GIVEN(beta), GIVEN(decay), GIVEN(kz), GIVEN(W), GIVEN(U), GIVEN(Wz), GIVEN(uz)};
	return run_tokens(&s, &s.W, build_fwd_frame32, build_fwd_frame64);
#undef GIVEN
}
static int op_frame_build_bwd(const gdnk_call *c) {
#define GIVEN(name) .name = TENSOR(frame_build_bwd, name)
	tokens s = {TOKENS_OF(frame_build_bwd), GIVEN(k), GIVEN(v), GIVEN(beta), GIVEN(decay), GIVEN(kz), GIVEN(dW), GIVEN(dU), GIVEN(dWz), GIVEN(duz), GIVEN(dk),
		GIVEN(dv), GIVEN(dbeta), GIVEN(ddecay), GIVEN(dkz)};
	return run_tokens(&s, &s.dk, build_bwd_frame32, build_bwd_frame64);
#undef GIVEN
}
static int op_frame_project_fwd(const gdnk_call *c) {
#define GIVEN(name) TENSOR(frame_project_fwd, name)
	tokens s = {TOKENS_OF(frame_project_fwd), .k = GIVEN(q), .S = GIVEN(S), .qz = GIVEN(qz), .z = GIVEN(z), .num = GIVEN(num), .den = GIVEN(den)};
	return run_tokens(&s, &s.num, project_fwd_frame32, project_fwd_frame64);
#undef GIVEN
}
static int op_frame_project_bwd(const gdnk_call *c) {
#define GIVEN(name) TENSOR(frame_project_bwd, name)
	tokens s = {TOKENS_OF(frame_project_bwd), .k = GIVEN(q), .S = GIVEN(S), .qz = GIVEN(qz), .z = GIVEN(z), .dnum = GIVEN(dnum), .dden = GIVEN(dden), .dk = GIVEN(dq),
		.dS = GIVEN(dS), .dkz = GIVEN(dqz), .dz = GIVEN(dz)};
	return run_tokens(&s, &s.dk, project_bwd_frame32, project_bwd_frame64);
#undef GIVEN
}
