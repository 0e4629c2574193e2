// The chunk form, forward and backward, fp32 inside: Gated DeltaNet, and Kimi Delta Attention, whose decays go by key channels.
//
// Chunks of FC tokens forward and C = 16 backward; a is exp(g), b and d its inclusive prefix and exclusive suffix products in the chunk, Gam_ij = a_{j+1}..a_i.
// All decays are running products of a: no quotient, no exponent above zero, g = -inf exact. e is the error before beta, V' = beta e.
//
// forward   GK = Gam K K^T (i>j)   PG = s Gam Q K^T (i>=j)
//           e  = v - (K b) S - GK V'      by substitution, in registers
//           O  = s (Q b) S + PG V'        S <- b_last S + (K d)^T V'
// backward  D the gradient of the state behind the chunk, m = -dv:
//           dV' = PG^T dO + (K d) D       Tu_j = dV'_j + sum_{i>j} GK_ij m_i,  m = -beta Tu,  dbeta = Tu.e
//           dP  = dO V'^T (i>=j)          F  = m V'^T (i>j)
//           dQ  = s b (dO S^T) + (s Gam dP) K
//           dK  = b (m S^T) + d (V' D^T) + (s Gam dP)^T Q + (Gam F + (Gam F)^T) K
//           D  <- b_last D + [s Q b ; K b]^T [dO ; m]
//           dg_t: every product whose decay contains a_t, summed without a subtraction (rectangle form)
// Neither the inverse of I + A nor w, u exist; e makes dbeta one dot product and beta = 0 no special case.
//
// Where decays go by channels, a, b, d and Gam_ij are vectors and multiply inside the products over channels: K b, Q b and K d are rows of their
// own, b_last is a factor for each row of S, and the token pairs' decays r = Gam_ij k_j run along with the rows:
//           dP, F as above; u_ij = s dP_ij q_i + F_ij k_i;  h_j(t) = sum_{i>=t} u_ij Gam_it runs up the rows
//           dQ_i = .. + sum_j s dP_ij r_j(i)        dK_i = .. + sum_j F_ij r_j(i) + h_i(i)        dg_t = .. + sum_{j<t} r_j(t) h_j(t)
//
// The forward keeps S as panels of PW value columns, the backward S^T and D^T as panels of PW key columns: then no operand and no result
// of a large product has to be transposed but dV' and K d.
//
// The tape: the state at the start of each segment of SEG tokens but the first, and e of each token, which does not depend on the chunk
// length. The backward recomputes the other chunks' entry states from e, one rank-C update each.
//
// FC: with 32 registers 8 tokens are one register tile, and their operands and a panel of the state share the first cache.
enum { C = 16, FC = RB == 8 ? 8 : C, SEG = 64, NCS = SEG / C, TOK = C / VW }; // TOK: vectors that hold a number of each of a chunk's tokens
#if RB == 8
#define ROWS_FC(F) F(0, 8)
#else
#define ROWS_FC ROWS16
#endif

// ---------------------------------------------------------------- prefetch
// Rows of strided [T, H, D] tensors are too short and too far apart for the hardware's prefetchers. Requests are spread through the
// products, a few lines a register tile: a burst would fill the miss buffers and stall the multiplications.
typedef struct {
	struct {
		const char *p;
		ptrdiff_t step; // from row to row, in bytes
		int rows, lines;
	} run[20];
	int at, end, line; // the next request: run, and line of its first row
} prefetch;
INL void pf_rows(prefetch *q, view v, int rows, int cols) {
	if (v.col != 1 || rows <= 0 || q->end == 20) return;
	q->run[q->end].p = v.p;
	q->run[q->end].step = v.row * size_of(v.type);
	q->run[q->end].rows = rows;
	q->run[q->end++].lines = (cols * size_of(v.type) + 63) / 64;
}
// The next n lines
INL void pf(prefetch *q, int n) {
	if (q->at == q->end) return;
	const char *p = q->run[q->at].p + q->line * 64;
	UNROLL for (int i = 0; i < n; i++) __builtin_prefetch(p + 64 * i, 0, 2); // beyond a row's end: harmless
	q->line += n;
	if (q->line < q->run[q->at].lines) return;
	q->line = 0;
	q->run[q->at].p += q->run[q->at].step;
	if (--q->run[q->at].rows == 0) q->at++;
}

// tile() for long k, a multiple of 32, with n lines each 32 steps
INL void tile_pf(int m, vf (*a)[NR], int k, const float *A, ptrdiff_t sm, const float *B, prefetch *q, int n) {
	for (int d = 0; d < k; d += 32) {
		pf(q, n);
		tile(m, a, 32, A + d, sm, 1, B + d * PW, PW);
	}
}

// ---------------------------------------------------------------- the call
typedef struct {
	gdnk_tensor q, k, v, g, gk, gv, beta, A_log, dt_bias, h0, cu, o, ht, dout, dht, dq, dk, dv, dg, dgk, dgv, dbeta, dA, dbias, dh0; // absent: dtype 0
	int64_t B, T, H, HV, K, V, N, G, KP, VP;
	double scale64;
	float scale;
	int l2norm, gate, beta_sigmoid, v_first, perv; // perv: beta per value channel
	int channels;                                  // g goes by key channels
	float lower;                                   // of the gate; 0: the softplus form
	float beta_max;                                // 2 with neg_eigval
	int64_t group, groups;                         // key heads a unit of work, units a sequence
	int64_t walk, walks;                           // the same in the token form's forward, of value heads
	gdnk_tensor slots, accepted;                   // decode: h0 is a pool of P states, and slots has R of each sequence
	int64_t P, R;
	int in_place;
	float *states, *errors;                        // the tape's parts, NULL without a tape
	int64_t nstates;                               // states a head
	int stream;                                    // outputs do not fit the caches: store past them
	double *sums;                                  // backward, gate: [N][HV][1 + biases] partial sums of dA_log and ddt_bias
	int biases;                                    // a value head: 1, or K
	gdnk_tensor h;                                 // forward: the states before every SEG tokens
	int64_t *first;                                // of each packed sequence, where its states begin in h
} scan;

typedef struct {
	int64_t b, t0, len; // batch, first token there, tokens
	int64_t row, seg;   // first row and state of the tape
} sequence;
static sequence sequence_of(const scan *s, int64_t n) {
	sequence q = {n, 0, s->T, 0, 0};
	if (s->cu.dtype) {
		const int64_t st = s->cu.stride[0];
		const char *p = (const char *)s->cu.data;
		int64_t a = s->cu.dtype == GDNK_I32 ? ((const int32_t *)p)[n * st] : ((const int64_t *)p)[n * st];
		int64_t z = s->cu.dtype == GDNK_I32 ? ((const int32_t *)p)[(n + 1) * st] : ((const int64_t *)p)[(n + 1) * st];
		q = (sequence){0, a, z - a, 0, 0};
	}
	q.row = q.b * s->T + q.t0;
	// No sum over the sequences before this one: floor(t/64) grows by at least the states that a sequence of t tokens keeps.
	q.seg = q.row / SEG;
	return q;
}

// ---------------------------------------------------------------- one chunk's operands
typedef struct {
	float a[C], eb[C], ed[C]; // exp(g), prefix and exclusive suffix products
	float raw[C], amp;        // the raw gate with its bias, and its amplitude
	float eL;
	int n;
} ALN gates;

typedef struct { // per key head
	float *k, *q; // rows of a chunk, KP wide, normalised
	float rn[2 * C], KK[C * C], QK[C * C]; // factors of the rows of k and q; products
} ALN keys;
typedef struct { // per value head
	gates gt;
	float GK[C * C], PG[C * C], fk[C], fq[C], fd[C]; // factors of the rows of K S, Q S and V': b, scale b, d
	int late;    // forward: the state is multiplied, by mul
	float mul;
	float *X;    // [2C][KP]  backward, channels: s Q b, K b
	float *KD;   // [C][KP]   likewise: K d
	float *VN;   // [C][VP]   backward: V'
	float *eLv;  // [KP]      like X: b_last
	float *a;    // [C][KP]   channels: exp(g)
	float *raw;  // [C][KP]   channels, gate: the raw gate with its bias
	float *be;   // [C][ldbe] beta, PW wide when it is the same for all value channels
	int ldbe;
} ALN chunk;

static const vi LANE = {0, 1, 2, 3,
#if VW >= 8
	4, 5, 6, 7,
#endif
#if VW >= 16
	8, 9, 10, 11, 12, 13, 14, 15,
#endif
};

// S_ij = x_i.y_j for i > j and P_ij = p_i.y_j for i >= j, c rows: blocks of 16 sums. On the diagonal the two share a block of 6 + 10.
INL void sums16(const vf *a, float *out) {
	UNROLL for (int i = 0; i < 16; i += VW) ST(out + i, redall(a + i));
}
INL void dots_below(const float *x, const float *y, int ld, float *S) {
	vf a[16];
	UNROLL for (int i = 0; i < 16; i++) a[i] = bc(0);
	for (int d = 0; d < ld; d += VW) {
		vf yj[4];
		UNROLL for (int j = 0; j < 4; j++) yj[j] = LD(y + j * ld + d);
		UNROLL for (int i = 0; i < 4; i++) {
			vf xi = LD(x + i * ld + d);
			UNROLL for (int j = 0; j < 4; j++) a[4 * i + j] += xi * yj[j];
		}
	}
	float r[16] ALN;
	sums16(a, r);
	for (int i = 0; i < 4; i++) memcpy(S + i * C, r + 4 * i, 16);
}
INL void dots_diagonal(const float *x, const float *p, const float *y, int ld, float *S, float *P) {
	vf a[16];
	UNROLL for (int i = 0; i < 16; i++) a[i] = bc(0);
	for (int d = 0; d < ld; d += VW) {
		vf yj[4];
		UNROLL for (int j = 0; j < 4; j++) yj[j] = LD(y + j * ld + d);
		UNROLL for (int i = 0; i < 4; i++) {
			vf xi = LD(x + i * ld + d), pi = LD(p + i * ld + d);
			UNROLL for (int j = 0; j < i; j++) a[i * (i - 1) / 2 + j] += xi * yj[j];
			UNROLL for (int j = 0; j <= i; j++) a[6 + i * (i + 1) / 2 + j] += pi * yj[j];
		}
	}
	float r[16] ALN;
	sums16(a, r);
	UNROLL for (int i = 0; i < 4; i++) {
		UNROLL for (int j = 0; j < i; j++) S[i * C + j] = r[i * (i - 1) / 2 + j];
		UNROLL for (int j = 0; j <= i; j++) P[i * C + j] = r[6 + i * (i + 1) / 2 + j];
	}
}
NOINL void dots(int c, const float *x, const float *p, const float *y, int ld, float *S, float *P) {
	for (int i = 0; i < c; i += 4) {
		for (int j = 0; j < i; j += 4) {
			dots_below(x + i * ld, y + j * ld, ld, S + i * C + j);
			dots_below(p + i * ld, y + j * ld, ld, P + i * C + j);
		}
		dots_diagonal(x + i * ld, p + i * ld, y + i * ld, ld, S + i * C + i, P + i * C + i);
	}
}
// Rows of Gam, one after the other: the row before times a_i, and a one
#define GAM_ROWS(c, gt, ...)                                                                \
	{                                                                                       \
		vf gam_[TOK];                                                                       \
		UNROLL for (int z = 0; z < TOK; z++) gam_[z] = bc(0);                               \
		for (int i = 0; i < c; i++)                                                         \
			for (int z = 0; z < TOK; z++) {                                                 \
				const vi j = LANE + z * VW;                                                 \
				const vf gam = gam_[z] = sel(j == i, bc(1), gam_[z] * (gt)->a[i]);          \
				__VA_ARGS__                                                                 \
			}                                                                               \
	}

static double amplitude(const scan *s, int64_t hv) {
	return s->A_log.dtype ? exp(ld1((const char *)s->A_log.data, s->A_log.dtype, hv * s->A_log.stride[0])) : 1;
}

// n of c rows of k and q from token t on, and their products
INL void load_keys(const scan *s, int c, keys *w, const sequence *q, int64_t t, int n, int64_t h) {
	rows_in(w->k, s->KP, token_view(&s->k, q->b, q->t0 + t, h), n, c, s->K);
	rows_in(w->q, s->KP, token_view(&s->q, q->b, q->t0 + t, h), n, c, s->K);
	if (s->l2norm) l2norm(w->k, s->KP, c, w->rn), l2norm(w->q, s->KP, c, w->rn + C);
	if (!s->channels) dots(c, w->k, w->q, w->k, s->KP, w->KK, w->QK);
}
INL void load_gates(const scan *s, int c, gates *w, const sequence *q, int64_t t, int n, int64_t hv) {
	w->n = n;
	float x[C] ALN = {0};
	if (s->g.dtype) column_in(x, token_view(&s->g, q->b, q->t0 + t, hv), n);
	if (s->gate) {
		w->amp = amplitude(s, hv);
		const float bias = s->dt_bias.dtype ? ld1((const char *)s->dt_bias.data, s->dt_bias.dtype, hv * s->dt_bias.stride[0]) : 0;
		for (int i = 0; i < C; i += VW) {
			const vf raw = LD(x + i) + bias;
			ST(w->raw + i, raw);
			ST(x + i, sel(LANE + i < n, gate_f32(raw, w->amp, s->lower), bc(0)));
		}
	}
	for (int i = 0; i < C; i += VW) ST(w->a + i, vexp(LD(x + i)));
	float p = 1;
	for (int i = 0; i < c; i++) w->eb[i] = p *= w->a[i];
	w->eL = p;
	p = 1;
	for (int i = c - 1; i >= 0; i--) w->ed[i] = p, p *= w->a[i];
}
INL void load_beta(const scan *s, int c, chunk *w, const sequence *q, int64_t t, int n, int64_t hv) {
	if (s->perv) {
		rows_in(w->be, w->ldbe, token_view(&s->beta, q->b, q->t0 + t, hv), n, c, s->V);
		if (s->beta_sigmoid)
			for (int i = 0; i < n; i++)
				for (int d = 0; d < s->V; d++) w->be[i * w->ldbe + d] = s->beta_max * sigmoid(w->be[i * w->ldbe + d]);
		return;
	}
	float x[C] = {0};
	for (int i = 0; i < n; i++) x[i] = 1;
	if (s->beta.dtype) column_in(x, token_view(&s->beta, q->b, q->t0 + t, hv), n);
	for (int i = 0; i < c; i++) {
		if (s->beta_sigmoid && i < n) x[i] = s->beta_max * sigmoid(x[i]);
		for (int d = 0; d < PW; d += VW) ST(w->be + i * PW + d, bc(x[i]));
	}
}
// The backward's operands, decays in them: X = [s Q b ; K b], KD = K d
static void decay_rows(const scan *s, const keys *k, chunk *w) {
	const int KP = s->KP;
	for (int d = 0; d < KP; d += VW) ST(w->eLv + d, bc(w->gt.eL));
	for (int i = 0; i < C; i++) {
		const vf x = bc(w->fq[i]), y = bc(w->fk[i]), z = bc(w->fd[i]);
		for (int d = 0; d < KP; d += VW) {
			const vf ki = LD(k->k + i * KP + d);
			ST(w->X + i * KP + d, LD(k->q + i * KP + d) * x);
			ST(w->X + (C + i) * KP + d, ki * y);
			ST(w->KD + i * KP + d, ki * z);
		}
	}
}
INL void decay_factors(const scan *s, int c, const keys *k, chunk *w) {
	for (int i = 0; i < c; i++) w->fk[i] = w->gt.eb[i], w->fq[i] = s->scale * w->gt.eb[i], w->fd[i] = w->gt.ed[i];
	GAM_ROWS(c, &w->gt, {
		ST(w->GK + i * C + z * VW, sel(j < i, LD(k->KK + i * C + z * VW) * gam, bc(0)));
		ST(w->PG + i * C + z * VW, sel(j <= i, LD(k->QK + i * C + z * VW) * (gam * s->scale), bc(0)));
	})
}

// ---------------------------------------------------------------- decays by channels
typedef struct { // rows of fp32 numbers; stream: store past the caches
	float *p;
	ptrdiff_t ld;
	int stream;
} rows;
// The rows of log decays, the caller's own where they are that
static rows load_channel_gates(const scan *s, int c, chunk *w, const sequence *q, int64_t t, int n, int64_t hv) {
	const int KP = s->KP;
	w->gt.n = n;
	if (s->g.dtype) {
		const view v = token_view(&s->g, q->b, q->t0 + t, hv);
		if (v.type == GDNK_F32 && v.col == 1 && n == c && s->K == KP && !s->gate) return (rows){(float *)v.p, v.row, 0};
		rows_in(w->a, KP, v, n, c, s->K);
	} else memset(w->a, 0, sizeof *w->a * c * KP);
	if (s->gate) {
		const float amp = w->gt.amp = amplitude(s, hv);
		if (s->dt_bias.dtype) {
			const gdnk_tensor *b = &s->dt_bias;
			rows_in(w->eLv, KP, (view){(char *)b->data + hv * b->stride[0] * size_of(b->dtype), b->dtype, 0, b->stride[1]}, 1, 1, s->K);
		} else memset(w->eLv, 0, sizeof *w->eLv * KP);
		for (int i = 0; i < n; i++) // rows behind the last token do not decay
			for (int d = 0; d < KP; d += VW) {
				const vf raw = LD(w->a + i * KP + d) + LD(w->eLv + d);
				if (w->raw) ST(w->raw + i * KP + d, raw);
				ST(w->a + i * KP + d, gate_f32(raw, amp, s->lower));
			}
	}
	return (rows){w->a, KP, 0};
}
// a = exp(g), the operands with their decays, b_last
INL void decay_channels_of(const scan *s, int c, const keys *k, chunk *w, rows g) {
	const ptrdiff_t KP = s->KP;
	const vf scale = bc(s->scale);
	for (ptrdiff_t d = 0; d < KP; d += VW) {
		vf p = bc(1);
		UNROLL for (int i = 0; i < c; i++) {
			const vf a = vexp(LD(g.p + i * g.ld + d));
			p *= a;
			ST(w->a + i * KP + d, a);
			ST(w->X + i * KP + d, LD(k->q + i * KP + d) * (p * scale));
			ST(w->X + (c + i) * KP + d, LD(k->k + i * KP + d) * p);
		}
		ST(w->eLv + d, p);
		p = bc(1);
		UNROLL for (int i = c - 1; i >= 0; i--) {
			ST(w->KD + i * KP + d, LD(k->k + i * KP + d) * p);
			p *= LD(w->a + i * KP + d);
		}
	}
}
// GK and PG in blocks of 4 rows by 4 columns: r_j = k_j a_{j+1}..a_i runs down the rows, kept in R [4][KP] from block to block.
INL void channel_pairs_of(const scan *s, int c, const keys *key, chunk *w, float *R) {
	enum { COLS = RB == 8 ? 2 : 1 }; // columns of a block whose sums the registers hold
	const ptrdiff_t KP = s->KP;
	float r[16] ALN;
	for (int j0 = 0; j0 < c; j0 += 4) {
		vf t[16];
		UNROLL for (int i = 0; i < 16; i++) t[i] = bc(0);
		for (ptrdiff_t d = 0; d < KP; d += VW) {
			const float *k = key->k + j0 * KP + d, *q = key->q + j0 * KP + d, *a = w->a + j0 * KP + d;
			vf x[4];
			UNROLL for (int i = 0; i < 4; i++) {
				const vf ai = LD(a + i * KP), ki = LD(k + i * KP), qi = LD(q + i * KP);
				UNROLL for (int j = 0; j < i; j++) {
					x[j] *= ai;
					t[i * (i - 1) / 2 + j] += ki * x[j];
				}
				x[i] = ki;
				UNROLL for (int j = 0; j <= i; j++) t[6 + i * (i + 1) / 2 + j] += qi * x[j];
			}
			UNROLL for (int j = 0; j < 4; j++) ST(R + j * KP + d, x[j]);
		}
		sums16(t, r);
		UNROLL for (int i = 0; i < 4; i++) {
			UNROLL for (int j = 0; j < i; j++) w->GK[(j0 + i) * C + j0 + j] = r[i * (i - 1) / 2 + j];
			UNROLL for (int j = 0; j <= i; j++) w->PG[(j0 + i) * C + j0 + j] = s->scale * r[6 + i * (i + 1) / 2 + j];
		}
		for (int i0 = j0 + 4; i0 < c; i0 += 4)
			for (int j = 0; j < 4; j += COLS) {
				UNROLL for (int i = 0; i < 16; i++) t[i] = bc(0);
				for (ptrdiff_t d = 0; d < KP; d += VW) {
					const float *k = key->k + i0 * KP + d, *q = key->q + i0 * KP + d, *a = w->a + i0 * KP + d;
					vf x[COLS];
					UNROLL for (int z = 0; z < COLS; z++) x[z] = LD(R + (j + z) * KP + d);
					UNROLL for (int i = 0; i < 4; i++) {
						const vf ai = LD(a + i * KP), ki = LD(k + i * KP), qi = LD(q + i * KP);
						UNROLL for (int z = 0; z < COLS; z++) {
							x[z] *= ai;
							t[z * 8 + 2 * i] += ki * x[z];
							t[z * 8 + 2 * i + 1] += qi * x[z];
						}
					}
					UNROLL for (int z = 0; z < COLS; z++) ST(R + (j + z) * KP + d, x[z]);
				}
				UNROLL for (int i = 0; i < 8 * COLS; i += VW) ST(r + i, redall(t + i));
				for (int z = 0; z < COLS; z++)
					for (int i = 0; i < 4; i++) {
						w->GK[(i0 + i) * C + j0 + j + z] = r[z * 8 + 2 * i];
						w->PG[(i0 + i) * C + j0 + j + z] = s->scale * r[z * 8 + 2 * i + 1];
					}
			}
	}
}
NOINL void decay_channels(const scan *s, const keys *k, chunk *w, rows g) { decay_channels_of(s, C, k, w, g); }
NOINL void channel_pairs(const scan *s, const keys *k, chunk *w, float *R) { channel_pairs_of(s, C, k, w, R); }
NOINL void decay_channels_fwd(const scan *s, const keys *k, chunk *w, rows g) { decay_channels_of(s, FC, k, w, g); }
NOINL void channel_pairs_fwd(const scan *s, const keys *k, chunk *w, float *R) { channel_pairs_of(s, FC, k, w, R); }

// ---------------------------------------------------------------- forward
// The state is kept as S = lag S': while the product of the decays is not too small, a chunk's decay goes into lag and from there into the
// factors of rows, and S' is not multiplied at all. Returns the new lag.
static float lag_state(chunk *c, float lag) {
	const float next = lag * c->gt.eL;
	c->late = !(next >= 1.f / 1024); // the factors must not come near the range's end
	for (int i = 0; i < FC; i++) {
		c->fk[i] *= lag;
		c->fq[i] *= lag;
		if (!c->late) c->fd[i] /= next;
	}
	c->mul = next;
	return c->late ? 1 : next;
}
// S' <- mul S' + K^T (d V'), or S <- b_last S + (K d)^T V'. V' stays in registers where there are enough: a fifth fewer loads than row tiles make.
enum { KEEP, ONE, ROWS }; // factors of the state: none, mul, one for each row, which are the decays of channels
#define FACTOR(row) (factors == ROWS ? bc(b_last[row]) : mul)
INL void update_panel(int factors, const chunk *c, const float *K, ptrdiff_t KP, float *S, float *VN, prefetch *Q) {
	const vf mul = bc(c->mul);
	const float *const b_last = c->eLv;
#if RB == 8
	vf x[FC][NR];
	UNROLL for (int j = 0; j < FC; j++)
		UNROLL for (int z = 0; z < NR; z++) x[j][z] = factors == ROWS ? (vf)LD(VN + j * PW + z * VW) : bc(c->fd[j]) * LD(VN + j * PW + z * VW);
	for (ptrdiff_t d = 0; d < KP; d += 4) {
		vf a[4][NR];
		if (d % 8 == 0) pf(Q, factors == ROWS ? 2 : 1);
		UNROLL for (int i = 0; i < 4; i++)
			UNROLL for (int z = 0; z < NR; z++) a[i][z] = factors == KEEP ? (vf)LD(S + (d + i) * PW + z * VW) : FACTOR(d + i) * LD(S + (d + i) * PW + z * VW);
		UNROLL for (int j = 0; j < FC; j++)
			UNROLL for (int i = 0; i < 4; i++) {
				vf k = bc((K + d + j * KP)[i]);
				UNROLL for (int z = 0; z < NR; z++) a[i][z] += k * x[j][z];
			}
		UNROLL for (int i = 0; i < 4; i++) UNROLL for (int z = 0; z < NR; z++) ST(S + (d + i) * PW + z * VW, a[i][z]);
	}
#else
	for (int j = 0; j < FC && factors != ROWS; j++)
		for (int z = 0; z < NR; z++) ST(VN + j * PW + z * VW, bc(c->fd[j]) * LD(VN + j * PW + z * VW));
	for (int d = 0; d < KP; d += C) {
#define UPDATE_ROWS(r, m)                                                                                    \
	{                                                                                                        \
		vf a[RB][NR];                                                                                        \
		float *Sr = S + (d + r) * PW;                                                                        \
		pf(Q, 4);                                                                                            \
		UNROLL for (int i = 0; i < m; i++)                                                                   \
			UNROLL for (int z = 0; z < NR; z++) a[i][z] = factors == KEEP ? (vf)LD(Sr + i * PW + z * VW) : FACTOR(d + r + i) * LD(Sr + i * PW + z * VW); \
		tile(m, a, FC, K + d + r, 1, KP, VN, PW);                                                            \
		UNROLL for (int i = 0; i < m; i++) UNROLL for (int z = 0; z < NR; z++) ST(Sr + i * PW + z * VW, a[i][z]); \
	}
		ROWS16(UPDATE_ROWS)
#undef UPDATE_ROWS
	}
#endif
}
#undef FACTOR
// One panel of PW value columns: S [KP][PW] is read by the rows of K and of Q, then updated, while it is in the first cache. The decays are
// factors of the products' rows, so that the rows as they came are the only other operand; those of channels are in the operands.
INL void panel(const scan *s, const chunk *c, int channels, const float *Krows, const float *Qrows, float *S, rows v, rows e, rows o, const float *be, prefetch *Q) {
	const ptrdiff_t KP = s->KP; // as wide as an address: then it is added in the address and needs no register of its own
	float VN[FC * PW] ALN;
#define ERROR_ROWS(r, m)                                                                                     \
	{                                                                                                        \
		vf a[RB][NR];                                                                                        \
		UNROLL for (int i = 0; i < m; i++) UNROLL for (int z = 0; z < NR; z++) a[i][z] = bc(0);             \
		tile_pf(m, a, KP, Krows + (r) * KP, KP, S, Q, 4);                                                    \
		UNROLL for (int i = 0; i < m; i++) UNROLL for (int z = 0; z < NR; z++) a[i][z] = LD(v.p + (r + i) * v.ld + z * VW) - (channels ? a[i][z] : bc(c->fk[r + i]) * a[i][z]); \
		for (int j = 0; j < r; j++) {                                                                        \
			vf x[NR];                                                                                        \
			UNROLL for (int z = 0; z < NR; z++) x[z] = LD(VN + j * PW + z * VW);                             \
			UNROLL for (int i = 0; i < m; i++) UNROLL for (int z = 0; z < NR; z++) a[i][z] -= bc(c->GK[(r + i) * C + j]) * x[z]; \
		}                                                                                                    \
		UNROLL for (int j = 0; j < m; j++) {                                                                 \
			UNROLL for (int z = 0; z < NR; z++) {                                                            \
				if (e.stream) st_stream(e.p + (r + j) * e.ld + z * VW, a[j][z]);                             \
				else if (e.p) ST(e.p + (r + j) * e.ld + z * VW, a[j][z]);                                    \
				a[j][z] *= LD(be + (r + j) * c->ldbe + z * VW);                                              \
				ST(VN + (r + j) * PW + z * VW, a[j][z]);                                                     \
			}                                                                                                \
			UNROLL for (int i = j + 1; i < m; i++)                                                           \
				UNROLL for (int z = 0; z < NR; z++) a[i][z] -= bc(c->GK[(r + i) * C + r + j]) * a[j][z];     \
		}                                                                                                    \
	}
	ROWS_FC(ERROR_ROWS)
#undef ERROR_ROWS
#define OUTPUT_ROWS(r, m)                                                                                    \
	{                                                                                                        \
		vf a[RB][NR];                                                                                        \
		UNROLL for (int i = 0; i < m; i++) UNROLL for (int z = 0; z < NR; z++) a[i][z] = bc(0);             \
		tile_pf(m, a, KP, Qrows + (r) * KP, KP, S, Q, 4);                                                    \
		if (!channels) UNROLL for (int i = 0; i < m; i++) UNROLL for (int z = 0; z < NR; z++) a[i][z] *= bc(c->fq[r + i]); \
		for (int j = 0; j < r; j++) tile_step(m, a, c->PG + (r) * C + j, C, VN + j * PW);                    \
		UNROLL for (int j = 0; j < m; j++) {                                                                 \
			vf x[NR];                                                                                        \
			UNROLL for (int z = 0; z < NR; z++) x[z] = LD(VN + (r + j) * PW + z * VW);                       \
			UNROLL for (int i = j; i < m; i++)                                                               \
				UNROLL for (int z = 0; z < NR; z++) a[i][z] += bc(c->PG[(r + i) * C + r + j]) * x[z];        \
		}                                                                                                    \
		if (o.stream)                                                                                        \
			UNROLL for (int i = 0; i < m; i++) UNROLL for (int z = 0; z < NR; z++) st_stream(o.p + (r + i) * o.ld + z * VW, a[i][z]); \
		else                                                                                                 \
			UNROLL for (int i = 0; i < m; i++) UNROLL for (int z = 0; z < NR; z++) ST(o.p + (r + i) * o.ld + z * VW, a[i][z]); \
	}
	if (o.p) {
		ROWS_FC(OUTPUT_ROWS)
	}
#undef OUTPUT_ROWS
	if (channels) update_panel(ROWS, c, c->KD, KP, S, VN, Q);
	else if (c->late) update_panel(ONE, c, Krows, KP, S, VN, Q);
	else update_panel(KEEP, c, Krows, KP, S, VN, Q);
}
INL rows shift(rows r, ptrdiff_t n) { return r.p += r.p ? n : 0, r; }
NOINL void panels(const scan *s, const chunk *c, const keys *key, float *S, rows v, rows e, rows o, prefetch *Q) {
	for (int j = 0; j < s->VP; j += PW)
		panel(s, c, 0, key->k, key->q, S + (ptrdiff_t)j * s->KP, shift(v, j), shift(e, j), shift(o, j), c->be + (s->perv ? j : 0), Q);
}
NOINL void channel_panels(const scan *s, const chunk *c, float *S, rows v, rows e, rows o, prefetch *Q) {
	for (int j = 0; j < s->VP; j += PW)
		panel(s, c, 1, c->X + FC * s->KP, c->X, S + (ptrdiff_t)j * s->KP, shift(v, j), shift(e, j), shift(o, j), c->be + (s->perv ? j : 0), Q);
}
// The caller's rows themselves, where the panels can use them; else scratch
static rows rows_or(const scan *s, view v, int n, float *scratch) {
	if (v.type == GDNK_F32 && v.col == 1 && n == FC && s->V == s->VP) return (rows){(float *)v.p, v.row, s->stream && !(((uintptr_t)v.p | 4 * v.row) & 63)};
	return (rows){scratch, s->VP, 0};
}

// States, K rows in panels of value columns: [VP/PW][KP][PW]
static void state_in(const scan *s, const gdnk_tensor *t, int64_t n, int64_t hv, float *S) {
	if (!t->dtype) {
		memset(S, 0, sizeof *S * s->KP * s->VP);
		return;
	}
	for (int j = 0; j < s->VP; j += PW) {
		view v = state_view(t, n, hv, s->v_first);
		v.p += j * v.col * size_of(v.type);
		rows_in(S + j * s->KP, PW, v, s->K, s->KP, s->V - j < 0 ? 0 : s->V - j < PW ? s->V - j : PW);
	}
}
static void state_out(const scan *s, view v, const float *S) {
	for (int j = 0; j < s->V; j += PW, v.p += PW * v.col * size_of(v.type)) rows_out(S + j * s->KP, PW, v, s->K, s->V - j < PW ? s->V - j : PW, 0);
}
// Where h keeps the state before token t: [B NT HV K V]
static view kept_view(const scan *s, const sequence *q, int64_t n, int64_t t, int64_t hv) {
	gdnk_tensor at = s->h;
	at.data += (q->b * at.stride[0] + ((s->first ? s->first[n] : 0) + t / SEG) * at.stride[1]) * size_of(at.dtype);
	at.stride[0] = 0;
	memmove(at.stride + 1, at.stride + 2, 3 * sizeof *at.stride);
	return state_view(&at, 0, hv, s->v_first);
}

// Scratch of a thread. take() counts when base is NULL.
typedef struct {
	keys key;
	chunk c[NCS];
	float *v, *e, *o;        // [C][VP]
	float *S, *D;            // states: of the unit's heads (forward S', backward D^T)
	float *lag;              // forward: of each state
	float *ST;               // backward: S^T at the entry of each chunk of a segment
	float *dqk;              // backward: dk, dq rows of a segment, summed over the value heads
	float *R;                // channels: rows of k on their way down the chunk
	float *G, *KDT, *rows, *xy, *dv, *db;
	float *dg;               // backward, channels: [C][KP]
	double *sums;            // of dA_log and ddt_bias, 1 + biases a value head
} scratch;
static float *take(char **p, int64_t n) {
	float *r = (float *)*p;
	*p += (n * 4 + 127 + 64) / 128 * 128 + 64; // an odd number of lines: arrays of a power of two must not share cache sets
	return r;
}
// n tokens; rows: their decayed rows are wanted
static int64_t chunk_scratch(const scan *s, int n, int rows, int raw, chunk *c, char *p) {
	char *p0 = p;
	c->ldbe = s->perv ? s->VP : PW;
	c->be = take(&p, n * c->ldbe);
	if (rows) {
		c->eLv = take(&p, s->KP);
		c->X = take(&p, 2 * n * s->KP);
		c->KD = take(&p, n * s->KP);
	}
	if (s->channels) c->a = take(&p, n * s->KP);
	c->raw = raw && s->channels && s->gate ? take(&p, n * s->KP) : NULL;
	return p - p0;
}
static int64_t fwd_scratch(const scan *s, scratch *w, char *p) {
	char *p0 = p;
	w->key.k = take(&p, FC * s->KP);
	w->key.q = take(&p, FC * s->KP);
	p += chunk_scratch(s, FC, s->channels, 0, &w->c[0], p);
	w->R = take(&p, 4 * s->KP);
	w->v = take(&p, FC * s->VP);
	w->e = take(&p, FC * s->VP);
	w->o = take(&p, FC * s->VP);
	w->S = take(&p, s->group * s->G * s->KP * s->VP);
	w->lag = take(&p, s->group * s->G);
	return p - p0;
}

// d = f s, past the caches where it is aligned
static void copy_state(float *d, const float *s, float f, int64_t n) {
	if ((uintptr_t)d & 63)
		for (int64_t i = 0; i < n; i += VW) ST(d + i, f * LD(s + i));
	else
		for (int64_t i = 0; i < n; i += VW) st_stream(d + i, f * LD(s + i));
}
static void fwd_unit(void *ctx, int64_t unit, char *base) {
	const scan *s = ctx;
	const uint64_t fp = flush_denormals();
	const int64_t n = unit / s->groups, h0 = unit % s->groups * s->group, h1 = h0 + s->group < s->H ? h0 + s->group : s->H;
	const int64_t KV = (int64_t)s->KP * s->VP, BT = s->B * s->T;
	const sequence q = sequence_of(s, n);
	scratch w;
	fwd_scratch(s, &w, base);
	chunk *c = &w.c[0];
	for (int64_t i = 0; i < (h1 - h0) * s->G; i++) {
		state_in(s, &s->h0, n, h0 * s->G + i, w.S + i * KV);
		w.lag[i] = 1;
	}
	// Segment after segment, all heads of the unit in each: their rows lie side by side, so that pages are used several times.
	for (int64_t t0 = 0; t0 < q.len; t0 += SEG)
		for (int64_t h = h0; h < h1; h++) {
			for (int64_t hv = h * s->G; hv < (h + 1) * s->G; hv++) {
				float *S = w.S + (hv - h0 * s->G) * KV;
				if (s->states && t0) copy_state(s->states + (hv * s->nstates + q.seg + t0 / SEG - 1) * KV, S, w.lag[hv - h0 * s->G], KV);
				if (s->h.dtype) state_out(s, kept_view(s, &q, n, t0, hv), S); // only with channels, where nothing lags
			}
			for (int64_t t = t0; t < t0 + SEG && t < q.len; t += FC) {
				const int m = q.len - t < FC ? q.len - t : FC;
				load_keys(s, FC, &w.key, &q, t, m, h);
				// what runs next: this segment's next chunk, the next head's first, or the next segment's
				prefetch Q;
				Q.at = Q.end = Q.line = 0;
				int64_t tn = t + FC, hn = h;
				if (tn >= t0 + SEG || tn >= q.len) hn = h + 1 < h1 ? h + 1 : h0, tn = h + 1 < h1 ? t0 : t0 + SEG;
				if (tn < q.len) {
					const int rows = q.len - tn < FC ? q.len - tn : FC;
					pf_rows(&Q, token_view(&s->k, q.b, q.t0 + tn, hn), rows, s->K);
					pf_rows(&Q, token_view(&s->q, q.b, q.t0 + tn, hn), rows, s->K);
					for (int64_t e = 0; e < s->G && e < 8; e++) {
						pf_rows(&Q, token_view(&s->v, q.b, q.t0 + tn, hn * s->G + e), rows, s->V);
						if (s->channels && s->g.dtype) pf_rows(&Q, token_view(&s->g, q.b, q.t0 + tn, hn * s->G + e), rows, s->K);
					}
				}
				for (int64_t hv = h * s->G; hv < (h + 1) * s->G; hv++) {
					load_beta(s, FC, c, &q, t, m, hv);
					if (s->channels) {
						decay_channels_fwd(s, &w.key, c, load_channel_gates(s, FC, c, &q, t, m, hv));
						channel_pairs_fwd(s, &w.key, c, w.R);
					} else {
						load_gates(s, FC, &c->gt, &q, t, m, hv);
						decay_factors(s, FC, &w.key, c);
						w.lag[hv - h0 * s->G] = lag_state(c, w.lag[hv - h0 * s->G]);
					}
					const view vv = token_view(&s->v, q.b, q.t0 + t, hv), ov = token_view(&s->o, q.b, q.t0 + t, hv);
					const rows v = rows_or(s, vv, m, w.v), o = s->o.dtype ? rows_or(s, ov, m, w.o) : (rows){0};
					float *tape = s->errors ? s->errors + (hv * BT + q.row + t) * s->VP : NULL;
					const rows e = {m == FC ? tape : w.e, s->VP, tape && m == FC && !((uintptr_t)tape & 63)};
					if (v.p == w.v) rows_in(w.v, s->VP, vv, m, FC, s->V);
					if (s->channels) channel_panels(s, c, w.S + (hv - h0 * s->G) * KV, v, e, o, &Q);
					else panels(s, c, &w.key, w.S + (hv - h0 * s->G) * KV, v, e, o, &Q);
					if (o.p == w.o) rows_out(w.o, s->VP, ov, m, s->V, s->stream);
					if (tape && m < FC) memcpy(tape, w.e, sizeof *tape * m * s->VP);
				}
			}
		}
	for (int64_t i = 0; i < (h1 - h0) * s->G && s->ht.dtype; i++) {
		for (int64_t d = 0; d < KV; d += VW) ST(w.S + i * KV + d, w.lag[i] * LD(w.S + i * KV + d));
		state_out(s, state_view(&s->ht, n, h0 * s->G + i, s->v_first), w.S + i * KV);
	}
	stream_fence();
	restore_denormals(fp);
}

// ---------------------------------------------------------------- backward
static int64_t bwd_scratch(const scan *s, scratch *w, char *p) {
	char *p0 = p;
	const int64_t KV = (int64_t)s->KP * s->VP;
	for (int i = 0; i < NCS; i++) {
		chunk *c = &w->c[i];
		p += chunk_scratch(s, C, 1, 1, c, p);
		c->VN = take(&p, C * s->VP);
	}
	w->key.k = take(&p, SEG * s->KP);
	w->key.q = take(&p, SEG * s->KP);
	w->dqk = take(&p, 2 * SEG * s->KP);
	w->e = take(&p, SEG * s->VP);
	w->ST = take(&p, NCS * KV);
	w->D = take(&p, s->group * s->G * KV);
	w->S = take(&p, KV);
	w->G = take(&p, 2 * C * s->VP);
	w->KDT = take(&p, C * s->KP);
	w->rows = take(&p, 3 * C * PW);
	w->xy = take(&p, 2 * C * VW);
	w->dv = take(&p, C * s->VP);
	w->db = take(&p, C * s->VP);
	if (s->channels) {
		w->R = take(&p, 4 * s->KP > C * C / 2 * VW ? 4 * s->KP : C * C / 2 * VW);
		w->dg = take(&p, C * s->KP);
	}
	w->sums = (double *)take(&p, 2 * s->group * s->G * (1 + s->biases));
	return p - p0;
}
// K-first panels [VP/PW][KP][PW] <-> panels of the transpose [KP/PW][VP][PW]
static void transpose_state(const float *s, int rows, int cols, float *d) {
	for (int j = 0; j < cols; j += PW)
		for (int i = 0; i < rows; i += PW) transpose_block(s + (ptrdiff_t)j * rows + i * PW, PW, d + (ptrdiff_t)i * cols + j * PW, PW, PW, PW);
}
// S^T behind the chunk from S^T before it
NOINL void next_state(const scan *s, const chunk *c, const float *S, float *So) {
	const int KP = s->KP, VP = s->VP;
	for (int p = 0; p < KP; p += PW)
		for (int v = 0; v < VP; v += C) {
			const float *Si = S + (ptrdiff_t)p * VP + v * PW;
			float *Sn = So + (ptrdiff_t)p * VP + v * PW;
#define ROWS(r, m)                                                                                           \
	{                                                                                                        \
		vf a[RB][NR];                                                                                        \
		UNROLL for (int i = 0; i < m; i++) UNROLL for (int z = 0; z < NR; z++) a[i][z] = LD(c->eLv + p + z * VW) * LD(Si + (r + i) * PW + z * VW); \
		tile(m, a, C, c->VN + v + r, 1, VP, c->KD + p, KP);                                                  \
		UNROLL for (int i = 0; i < m; i++) UNROLL for (int z = 0; z < NR; z++) ST(Sn + (r + i) * PW + z * VW, a[i][z]); \
	}
			ROWS16(ROWS)
#undef ROWS
		}
}
// dV' and the transposed solve, VW value columns at a time: rows C.. of G become m, dv and the products Tu.e come out
NOINL void solve_back(const scan *s, chunk *c, scratch *w, const float *D, const float *e, prefetch *Q) {
	const int KP = s->KP, VP = s->VP;
	float *G = w->G;
	vf pd[C];
	UNROLL for (int i = 0; i < C; i++) pd[i] = bc(0);
	enum { TM = VW == 16 ? 16 : RB == 8 ? 4 : VW / 2 }; // rows of a tile that is TOK vectors wide
	for (int v = 0; v < VP; v += VW) {
		float y[VW * C] ALN, yt[C * VW] ALN;
		for (int r = 0; r < VW; r += TM) {
			vf a[TM][TOK];
			UNROLL for (int i = 0; i < TM; i++) UNROLL for (int z = 0; z < TOK; z++) a[i][z] = bc(0);
			for (int p = 0; p < KP; p += PW) {
				const float *A = D + (ptrdiff_t)p * VP + (v + r) * PW, *B = w->KDT + p * C;
				pf(Q, 4);
				_Pragma("GCC unroll 2") for (int d = 0; d < PW; d++) {
					vf b[TOK];
					UNROLL for (int z = 0; z < TOK; z++) b[z] = LD(B + d * C + z * VW);
					UNROLL for (int i = 0; i < TM; i++) UNROLL for (int z = 0; z < TOK; z++) a[i][z] += bc(A[i * PW + d]) * b[z];
				}
			}
			UNROLL for (int i = 0; i < TM; i++) UNROLL for (int z = 0; z < TOK; z++) ST(y + (r + i) * C + z * VW, a[i][z]);
		}
		transpose_block(y, C, yt, VW, VW, C);
		vf t[C];
		UNROLL for (int j = 0; j < C; j++) t[j] = LD(yt + j * VW);
		UNROLL for (int i = 0; i < C; i++) {
			vf x = LD(G + i * VP + v);
			UNROLL for (int j = 0; j <= i; j++) t[j] += bc(c->PG[i * C + j]) * x;
			BARRIER;
		}
		UNROLL for (int j = C - 1; j >= 0; j--) {
			vf u = t[j], b = LD(c->be + j * c->ldbe + (s->perv ? v : 0)), x = u * LD(e + j * VP + v), m = -b * u;
			if (s->perv) ST(w->db + j * VP + v, x);
			pd[j] += x;
			ST(G + (C + j) * VP + v, m);
			ST(w->dv + j * VP + v, -m);
			UNROLL for (int i = 0; i < j; i++) t[i] += bc(c->GK[j * C + i]) * m;
			BARRIER;
		}
	}
	if (!s->perv)
		for (int i = 0; i < C; i += VW) ST(w->db + i, redall(pd + i));
}
// The token pairs of VW key channels from p on, which are the lanes: gradients of the rows of q and k, and of the gate. add: dq, dk hold the
// sums over earlier value heads.
typedef struct {
	const float *M, *W; // [C][C] what multiplies rows of k in dq; in dk. channels: s dP, F
	float *dk, *dq;
	int add;
} pairs;
NOINL void pair_rows(const scan *s, const chunk *c, scratch *w, const keys *R, const pairs *x, const float *rows, ptrdiff_t p) {
	const ptrdiff_t KP = s->KP;
	const float *k = R->k + p, *q = R->q + p, *M = x->M, *W = x->W;
	float *dk = x->dk + p, *dq = x->dq + p;
	vf t[C];
	for (int i = 0; i < C; i++) {
		vf Sq = LD(rows + i * PW), Sk = LD(rows + (C + i) * PW), y = LD(rows + (2 * C + i) * PW);
		vf x = LD(c->X + i * KP + p) * Sq + LD(c->X + (C + i) * KP + p) * Sk;
		ST(w->xy + i * VW, LD(w->xy + i * VW) + x);
		ST(w->xy + (C + i) * VW, LD(w->xy + (C + i) * VW) + LD(c->KD + i * KP + p) * y);
	}
	UNROLL for (int i = 0; i < C; i++) t[i] = LD(rows + i * PW) * (c->gt.eb[i] * s->scale);
	UNROLL for (int j = 0; j < C; j++) {
		vf x = LD(k + j * KP);
		UNROLL for (int i = j; i < C; i++) t[i] += bc(M[i * C + j]) * x;
		BARRIER;
	}
	for (int i = 0; i < C; i++) ST(dq + i * KP, t[i] + (x->add ? (vf)LD(dq + i * KP) : bc(0)));
	UNROLL for (int i = 0; i < C; i++) t[i] = LD(rows + (C + i) * PW) * c->gt.eb[i] + LD(rows + (2 * C + i) * PW) * c->gt.ed[i];
	UNROLL for (int j = 0; j < C; j++) {
		vf x = LD(k + j * KP), y = LD(q + j * KP);
		UNROLL for (int i = 0; i < C; i++) {
			if (i != j) t[i] += bc(W[i * C + j]) * x;
			if (i <= j) t[i] += bc(M[j * C + i]) * y;
		}
		BARRIER;
	}
	for (int i = 0; i < C; i++) ST(dk + i * KP, t[i] + (x->add ? (vf)LD(dk + i * KP) : bc(0)));
}
// Where decays go by channels: down the rows and up again, BJ columns of pairs at a time. r of each pair stays in w->R, x and the first part
// of dk of each token in w->xy.
enum { BJ = RB == 8 ? C : C / 2 };
INL vf *pair_at(scratch *w, int i, int j) { return (vf *)w->R + i * (i - 1) / 2 + j; }
NOINL void rows_down(const scan *s, const chunk *c, scratch *w, const keys *key, const pairs *x, const float *rows, ptrdiff_t p) {
	const ptrdiff_t KP = s->KP;
	const float *k = key->k + p, *a = c->a + p, *P = x->M, *F = x->W;
	float *dq = x->dq + p;
	vf bk = bc(1), bq = bc(s->scale);
	UNROLL for (int j0 = 0; j0 < C; j0 += BJ) {
		vf r[BJ];
		UNROLL for (int i = j0; i < C; i++) {
			const vf ai = LD(a + i * KP);
			vf q0, q1 = bc(0), k0, k1 = bc(0);
			if (j0 == 0) {
				const vf Sq = LD(rows + i * PW), Sk = LD(rows + (C + i) * PW);
				bk *= ai, bq *= ai;
				q0 = bq * Sq, k0 = bk * Sk;
				if (x->add) q0 += LD(dq + i * KP);
				ST(w->xy + i * VW, LD(c->X + i * KP + p) * Sq + LD(c->X + (C + i) * KP + p) * Sk);
			} else q0 = LD(dq + i * KP), k0 = LD(w->xy + (C + i) * VW);
			UNROLL for (int j = 0; j < BJ; j++) {
				if (j0 + j >= i) continue;
				r[j] *= ai;
				*pair_at(w, i, j0 + j) = r[j];
				if (j & 1) q1 += bc(P[i * C + j0 + j]) * r[j], k1 += bc(F[i * C + j0 + j]) * r[j];
				else q0 += bc(P[i * C + j0 + j]) * r[j], k0 += bc(F[i * C + j0 + j]) * r[j];
			}
			if (i < j0 + BJ) {
				r[i - j0] = LD(k + i * KP);
				q0 += bc(P[i * C + i]) * r[i - j0];
			}
			ST(dq + i * KP, q0 + q1);
			ST(w->xy + (C + i) * VW, k0 + k1);
			BARRIER;
		}
	}
}
// z: b_last <S, D>
NOINL void rows_up(const scan *s, const chunk *c, scratch *w, const keys *key, const pairs *x, const float *rows, ptrdiff_t p, vf z) {
	const ptrdiff_t KP = s->KP;
	const float *k = key->k + p, *q = key->q + p, *a = c->a + p, *P = x->M, *F = x->W;
	float *dk = x->dk + p, *dg = w->dg + p;
	UNROLL for (int j0 = 0; j0 < C; j0 += BJ) {
		vf h[BJ], next = bc(0);
		UNROLL for (int i = C - 1; i >= j0; i--) {
			const vf qi = LD(q + i * KP), ki = LD(k + i * KP);
			vf g0 = j0 == 0 ? bc(0) : (vf)LD(dg + i * KP), g1 = bc(0);
			UNROLL for (int j = 0; j < BJ; j++) {
				if (j0 + j > i) continue;
				vf u = bc(P[i * C + j0 + j]) * qi;
				if (j0 + j < i) u += bc(F[i * C + j0 + j]) * ki;
				h[j] = i < C - 1 ? h[j] * next + u : u;
				if (j0 + j < i) {
					if (j & 1) g1 += h[j] * *pair_at(w, i, j0 + j);
					else g0 += h[j] * *pair_at(w, i, j0 + j);
				}
			}
			next = LD(a + i * KP);
			ST(dg + i * KP, g0 + g1);
			if (i < j0 + BJ) ST(w->xy + (C + i) * VW, LD(w->xy + (C + i) * VW) + h[i - j0]);
			BARRIER;
		}
	}
	vf sum = bc(0), d = bc(1);
	for (int i = C - 1; i >= 0; i--) {
		const vf y = LD(rows + (2 * C + i) * PW);
		ST(dk + i * KP, LD(w->xy + (C + i) * VW) + d * y + (x->add ? (vf)LD(dk + i * KP) : bc(0)));
		d *= LD(a + i * KP);
		sum += LD(w->xy + i * VW);
		ST(dg + i * KP, LD(dg + i * KP) + sum);
	}
	for (int i = 0; i < C; i++) {
		ST(dg + i * KP, LD(dg + i * KP) + z);
		z += LD(c->KD + i * KP + p) * LD(rows + (2 * C + i) * PW);
	}
}
// The sweep over the key columns: D, what token pairs need of the large products, and the pairs.
NOINL void sweep(const scan *s, const chunk *c, scratch *w, float *D, const float *S, const keys *R, const pairs *x, vf *sd, prefetch *Q) {
	const int KP = s->KP, VP = s->VP;
	float *G = w->G, *rows = w->rows;
	for (int p = 0; p < KP; p += PW) {
		float *Dp = D + (ptrdiff_t)p * VP;
		const float *Sp = S + (ptrdiff_t)p * VP;
#define PRODUCT(A, B, r, m, out)                                                                             \
	{                                                                                                        \
		vf a[RB][NR];                                                                                        \
		UNROLL for (int i = 0; i < m; i++) UNROLL for (int z = 0; z < NR; z++) a[i][z] = bc(0);             \
		tile_pf(m, a, VP, (A) + (r) * VP, VP, B, Q, 4);                                                      \
		UNROLL for (int i = 0; i < m; i++) UNROLL for (int z = 0; z < NR; z++) ST((out) + (r + i) * PW + z * VW, a[i][z]); \
	}
#define GS0(r, m) PRODUCT(G, Sp, r, m, rows)
#define GS1(r, m) PRODUCT(G + C * VP, Sp, r, m, rows + C * PW)
#define VD(r, m) PRODUCT(c->VN, Dp, r, m, rows + 2 * C * PW)
		ROWS16(GS0)
		ROWS16(GS1)
		ROWS16(VD)
#undef GS0
#undef GS1
#undef VD
#undef PRODUCT
		float sum[PW] ALN = {0}; // in memory between the tiles, which need every register
		for (int v = 0; v < VP; v += C) {
#define ROWS(r, m)                                                                                           \
	{                                                                                                        \
		vf a[RB][NR];                                                                                        \
		float *Dr = Dp + (v + r) * PW;                                                                       \
		const float *Sr = Sp + (v + r) * PW;                                                                 \
		pf(Q, 2);                                                                                               \
		UNROLL for (int z = 0; z < NR; z++) {                                                                \
			const vf eL = LD(c->eLv + p + z * VW);                                                           \
			vf y = LD(sum + z * VW);                                                                         \
			UNROLL for (int i = 0; i < m; i++) {                                                             \
				const vf x = LD(Dr + i * PW + z * VW);                                                       \
				y += x * LD(Sr + i * PW + z * VW);                                                           \
				a[i][z] = eL * x;                                                                            \
			}                                                                                                \
			ST(sum + z * VW, y);                                                                             \
		}                                                                                                    \
		BARRIER;                                                                                             \
		tile(m, a, 2 * C, G + v + r, 1, VP, c->X + p, KP);                                                   \
		UNROLL for (int i = 0; i < m; i++) UNROLL for (int z = 0; z < NR; z++) ST(Dr + i * PW + z * VW, a[i][z]); \
	}
			ROWS16(ROWS)
#undef ROWS
		}
		for (int z = 0; z < PW; z += VW) {
			const vf decayed = LD(sum + z) * LD(c->eLv + p + z);
			if (s->channels) {
				rows_down(s, c, w, R, x, rows + z, p + z);
				rows_up(s, c, w, R, x, rows + z, p + z, decayed);
			} else {
				*sd += decayed;
				pair_rows(s, c, w, R, x, rows + z, p + z);
			}
		}
	}
}
// dg from the pairs' products X, the tokens' x and y, and z = b_last <S, D>
static void gate_gradient(const float *X, const float *x, const float *y, float z, float *dg) {
	float acc[C] ALN = {0}, h[C * C] ALN;
	for (int t = C - 1; t >= 0; t--)
		for (int j = 0; j < C; j += VW) {
			vf a = LD(acc + j) + LD(X + t * C + j);
			ST(acc + j, a);
			ST(h + t * C + j, sel(LANE + j < t, a, bc(0)));
		}
	float sx = 0, sy = z;
	for (int t = C - 1; t >= 0; t--) {
		float r = 0;
		for (int j = 0; j < t; j++) r += h[t * C + j];
		sx += x[t];
		dg[t] = r + sx;
	}
	for (int t = 0; t < C; t++) {
		dg[t] += sy;
		sy += y[t];
	}
}
static void channel_gate_gradient(const scan *s, const chunk *c, scratch *w, const sequence *q, int64_t t, int64_t hv, double *sums) {
	const int KP = s->KP, n = c->gt.n;
	if (s->gate)
		for (int d = 0; d < KP; d += VW) {
			vf sA = bc(0), sx = bc(0);
			for (int i = 0; i < n; i++) {
				vf dx, dA;
				gate_bwd_f32(LD(c->raw + i * KP + d), c->gt.amp, s->lower, LD(w->dg + i * KP + d), &dx, &dA);
				ST(w->dg + i * KP + d, dx);
				sA += dA, sx += dx;
			}
			for (int j = 0; j < VW && d + j < s->K; j++) sums[0] += sA[j], sums[1 + d + j] += sx[j];
		}
	if (s->dg.dtype) rows_out(w->dg, KP, token_view(&s->dg, q->b, q->t0 + t, hv), n, s->K, s->stream);
}
// One chunk of one value head: D^T behind it becomes D^T before it
static void bwd_chunk(const scan *s, chunk *c, scratch *w, const sequence *q, int64_t t, int64_t hv, float *D, const float *S, const keys *R, const float *e,
	float *dk, float *dq, int add, double *sums, prefetch *Q) {
	const int n = c->gt.n, VP = s->VP;
	rows_in(w->G, VP, token_view(&s->dout, q->b, q->t0 + t, hv), n, C, s->V);
	transpose_block(c->KD, s->KP, w->KDT, C, C, s->KP);
	solve_back(s, c, w, D, e, Q);
	rows_out(w->dv, VP, token_view(&s->dv, q->b, q->t0 + t, hv), n, s->V, s->stream);

	float F[C * C] ALN, dP[C * C] ALN;
	dots(C, w->G + C * VP, w->G, c->VN, VP, F, dP);
	if (s->channels) {
		for (int i = 0; i < C * C; i += VW) ST(dP + i, LD(dP + i) * s->scale);
		sweep(s, c, w, D, S, R, &(pairs){dP, F, dk, dq, add}, NULL, Q);
		channel_gate_gradient(s, c, w, q, t, hv, sums);
	} else {
		float M[C * C] ALN, W[C * C] ALN, Wt[C * C] ALN, X[C * C] ALN;
		GAM_ROWS(C, &c->gt, {
			const int o = i * C + z * VW;
			const vf f = sel(j < i, LD(F + o), bc(0)), p = sel(j <= i, LD(dP + o), bc(0));
			ST(M + o, p * gam * s->scale);
			ST(W + o, f * gam);
			ST(X + o, f * LD(c->GK + o) + sel(j < i, p * LD(c->PG + o), bc(0)));
		})
		transpose_block(W, C, Wt, C, C, C);
		for (int i = 0; i < C * C; i += VW) ST(W + i, LD(W + i) + LD(Wt + i));
		vf sd = bc(0);
		memset(w->xy, 0, sizeof(float) * 2 * C * VW);
		sweep(s, c, w, D, S, R, &(pairs){M, W, dk, dq, add}, &sd, Q);
		if (s->dg.dtype || s->sums) {
			float xy[2 * C] ALN, dg[C] ALN, z = 0;
			for (int i = 0; i < 2 * C; i += VW) {
				vf r[VW];
				UNROLL for (int j = 0; j < VW; j++) r[j] = LD(w->xy + (i + j) * VW);
				ST(xy + i, redall(r));
			}
			for (int i = 0; i < VW; i++) z += sd[i];
			gate_gradient(X, xy, xy + C, z, dg);
			if (s->gate)
				for (int i = 0; i < C; i += VW) {
					vf dx, dA;
					gate_bwd_f32(LD(c->gt.raw + i), c->gt.amp, s->lower, LD(dg + i), &dx, &dA);
					ST(dg + i, dx);
					for (int j = 0; j < VW && i + j < n; j++) sums[0] += dA[j], sums[1] += dx[j];
				}
			if (s->dg.dtype) column_out(dg, token_view(&s->dg, q->b, q->t0 + t, hv), n);
		}
	}
	if (s->dbeta.dtype) {
		view v = token_view(&s->dbeta, q->b, q->t0 + t, hv);
		for (int i = 0; i < n; i++)
			for (int d = 0; d < (s->perv ? s->V : 1); d++) {
				float *x = s->perv ? &w->db[i * VP + d] : &w->db[i], b = c->be[i * c->ldbe + d];
				if (s->beta_sigmoid) *x *= b * (1 - b / s->beta_max);
			}
		if (s->perv) rows_out(w->db, VP, v, n, s->V, s->stream);
		else column_out(w->db, v, n);
	}
}
static void bwd_unit(void *ctx, int64_t unit, char *base) {
	const scan *s = ctx;
	const uint64_t fp = flush_denormals();
	const int64_t n = unit / s->groups, h0 = unit % s->groups * s->group, h1 = h0 + s->group < s->H ? h0 + s->group : s->H;
	const int64_t KV = (int64_t)s->KP * s->VP, BT = s->B * s->T;
	const int KP = s->KP, VP = s->VP;
	const sequence q = sequence_of(s, n);
	scratch w;
	bwd_scratch(s, &w, base);
	const int nsums = 1 + s->biases;
	memset(w.sums, 0, sizeof *w.sums * s->group * s->G * nsums);
	for (int64_t hv = h0 * s->G; hv < h1 * s->G; hv++) {
		state_in(s, &s->dht, n, hv, w.S);
		transpose_state(w.S, KP, VP, w.D + (hv - h0 * s->G) * KV);
	}
	for (int64_t t0 = (q.len - 1) / SEG * SEG; t0 >= 0 && q.len; t0 -= SEG)
		for (int64_t h = h0; h < h1; h++) {
			const int len = q.len - t0 < SEG ? q.len - t0 : SEG, nc = (len + C - 1) / C;
			keys key[NCS];
			for (int i = 0; i < nc; i++) {
				const int m = len - i * C < C ? len - i * C : C;
				keys *k = &key[i];
				*k = (keys){.k = w.key.k + i * C * KP, .q = w.key.q + i * C * KP};
				load_keys(s, C, k, &q, t0 + i * C, m, h);
			}
			for (int64_t hv = h * s->G; hv < (h + 1) * s->G; hv++) {
				float *D = w.D + (hv - h0 * s->G) * KV;
				const float *tape_e = s->errors + (hv * BT + q.row + t0) * VP;
				if (t0) transpose_state(s->states + (hv * s->nstates + q.seg + t0 / SEG - 1) * KV, KP, VP, w.ST);
				else {
					state_in(s, &s->h0, n, hv, w.S);
					transpose_state(w.S, KP, VP, w.ST);
				}
				for (int i = 0; i < nc; i++) { // the chunks' operands and entry states
					const int m = len - i * C < C ? len - i * C : C;
					chunk *c = &w.c[i];
					float *e = w.e + i * C * VP;
					load_beta(s, C, c, &q, t0 + i * C, m, hv);
					if (s->channels) {
						decay_channels(s, &key[i], c, load_channel_gates(s, C, c, &q, t0 + i * C, m, hv));
						channel_pairs(s, &key[i], c, w.R);
					} else {
						load_gates(s, C, &c->gt, &q, t0 + i * C, m, hv);
						decay_factors(s, C, &key[i], c);
						decay_rows(s, &key[i], c);
					}
					rows_in(e, VP, (view){(char *)(tape_e + i * C * VP), GDNK_F32, VP, 1}, m, C, VP);
					for (int j = 0; j < C; j++)
						for (int d = 0; d < VP; d += VW) ST(c->VN + j * VP + d, LD(e + j * VP + d) * LD(c->be + j * c->ldbe + (s->perv ? d : 0)));
					if (i + 1 < nc) next_state(s, c, w.ST + i * KV, w.ST + (i + 1) * KV);
				}
				for (int i = nc - 1; i >= 0; i--) {
					prefetch Q;
					Q.at = Q.end = Q.line = 0;
					const int64_t t = t0 + i * C, hn = hv + 1 < h1 * s->G ? hv + 1 : h0 * s->G, tn = hn > hv ? t0 : t0 - SEG;
					// The next chunk's dO, and for what runs after this segment of this head, as much as belongs to one chunk.
					if (i) pf_rows(&Q, token_view(&s->dout, q.b, q.t0 + t - C, hv), C, s->V);
					else if (tn >= 0) pf_rows(&Q, token_view(&s->dout, q.b, q.t0 + tn + SEG - C, hn), len < SEG && tn == t0 ? 0 : C, s->V);
					if (tn >= 0 && len == SEG) {
						const int64_t u = tn + i * C;
						pf_rows(&Q, token_view(&s->q, q.b, q.t0 + u, hn / s->G), C, s->K);
						pf_rows(&Q, token_view(&s->k, q.b, q.t0 + u, hn / s->G), C, s->K);
						if (s->channels && s->g.dtype) pf_rows(&Q, token_view(&s->g, q.b, q.t0 + u, hn), C, s->K);
						pf_rows(&Q, (view){(char *)(s->errors + (hn * BT + q.row + u) * VP), GDNK_F32, VP, 1}, C, VP);
						if (tn) pf_rows(&Q, (view){(char *)(s->states + (hn * s->nstates + q.seg + tn / SEG - 1) * KV + i * KV / NCS), GDNK_F32, 128, 1}, (KV / NCS + 127) / 128, 128);
					}
					bwd_chunk(s, &w.c[i], &w, &q, t, hv, D, w.ST + i * KV, &key[i], w.e + i * C * VP, w.dqk + i * C * KP, w.dqk + (SEG + i * C) * KP, hv > h * s->G,
						w.sums + (hv - h0 * s->G) * nsums, &Q);
				}
			}
			for (int i = 0; i < nc; i++) {
				const int m = len - i * C < C ? len - i * C : C;
				float *dk = w.dqk + i * C * KP, *dq = dk + SEG * KP;
				if (s->l2norm) {
					l2norm_bwd(dk, key[i].k, KP, C, key[i].rn);
					l2norm_bwd(dq, key[i].q, KP, C, key[i].rn + C);
				}
				rows_out(dk, KP, token_view(&s->dk, q.b, q.t0 + t0 + i * C, h), m, s->K, s->stream);
				if (s->dq.dtype) rows_out(dq, KP, token_view(&s->dq, q.b, q.t0 + t0 + i * C, h), m, s->K, s->stream);
			}
		}
	for (int64_t hv = h0 * s->G; hv < h1 * s->G; hv++) {
		if (s->dh0.dtype) {
			transpose_state(w.D + (hv - h0 * s->G) * KV, VP, KP, w.S);
			state_out(s, state_view(&s->dh0, n, hv, s->v_first), w.S);
		}
		if (s->sums) memcpy(s->sums + (n * s->HV + hv) * nsums, w.sums + (hv - h0 * s->G) * nsums, sizeof *w.sums * nsums);
	}
	stream_fence();
	restore_denormals(fp);
}

