// Decoding from and to a pool of states: which slots a call uses, their check, and the entry. Which heads walk together is in slots.h.
typedef struct {
	scan s;
	gdnk_tensor pool, slots, accepted; // slots, accepted: absent with dtype 0
	int64_t P, R, group, groups;       // slots of the pool and of a sequence, value heads a unit of work, units a sequence
	int in_place;
} decode;

static int64_t index_at(const gdnk_tensor *t, int64_t i, int64_t j) {
	const ptrdiff_t at = i * t->stride[0] + (t->rank == 2 ? j * t->stride[1] : 0);
	return t->dtype == GDNK_I32 ? ((const int32_t *)t->data)[at] : ((const int64_t *)t->data)[at];
}
// Where sequence n begins; below 0: it is padding.
static int64_t first_slot(const decode *c, int64_t n) {
	if (!c->slots.dtype) return n;
	return c->R ? index_at(&c->slots, n, c->accepted.dtype ? index_at(&c->accepted, n, 0) - 1 : 0) : -1;
}
// Where the state after token t of sequence n goes; below 0: nowhere.
static int64_t next_slot(const decode *c, int64_t n, int64_t t, int last) {
	if (!c->in_place) return -1;
	return c->slots.dtype ? index_at(&c->slots, n, t) : last ? n : -1;
}

__attribute__((format(printf, 2, 3))) NOINL int refuse(const gdnk_call *c, const char *sentence, ...) {
	va_list list;
	va_start(list, sentence);
	vsnprintf(c->refusal, GDNK_REFUSAL, sentence, list);
	va_end(list);
	return GDNK_REFUSED;
}

// Which sequence was the first to use a slot, by hash
typedef struct {
	int64_t slot, owner; // owner: 1 + the sequence; 0: free
	int written;
} claim;
static int64_t claimed(claim *all, int64_t mask, int64_t slot, int64_t n, int write) {
	int64_t i = (int64_t)((uint64_t)slot * 0x9E3779B97F4A7C15u >> 32) & mask;
	while (all[i].owner && all[i].slot != slot) i = (i + 1) & mask;
	if (!all[i].owner) all[i] = (claim){slot, n + 1, write};
	else if (all[i].owner == n + 1) all[i].written |= write;
	else if (write || all[i].written) return all[i].owner - 1;
	return -1;
}

// Looks at every index that the call will follow.
static int check_slots(const gdnk_call *call, const decode *c) {
	const scan *s = &c->s;
	claim *all = NULL;
	int64_t size = 16, used = 0;
	int status = GDNK_OK;
	if (!c->slots.dtype) return status;
	for (int64_t n = 0; n < s->N; n++) used += 1 + sequence_of(s, n).len;
	if (c->in_place && s->N > 1) {
		while (size < 2 * used) size *= 2;
		if (!(all = calloc(size, sizeof *all))) return GDNK_NO_MEMORY;
	}
	for (int64_t n = 0; n < s->N && !status; n++) {
		const int64_t len = sequence_of(s, n).len;
		if (!len && (!s->ht.dtype || !c->R)) continue;
		const int64_t accepted = c->accepted.dtype ? index_at(&c->accepted, n, 0) : 1;
		if (accepted < 1 || accepted > c->R) {
			status = refuse(call, "num_accepted_tokens[%lld] is %lld, expected 1 to R=%lld", (long long)n, (long long)accepted, (long long)c->R);
			break;
		}
		if (len > c->R) {
			status = refuse(call, "sequence %lld has %lld tokens, expected at most R=%lld, its slots in ssm_state_indices", (long long)n, (long long)len, (long long)c->R);
			break;
		}
		for (int64_t i = -1; i < (c->in_place ? len : 0); i++) { // where it begins, then where it stores
			const int64_t at = i < 0 ? accepted - 1 : i, slot = index_at(&c->slots, n, at);
			char place[48];
			if (c->slots.rank == 2) snprintf(place, sizeof place, "[%lld, %lld]", (long long)n, (long long)at);
			else snprintf(place, sizeof place, "[%lld]", (long long)n);
			if (slot < 0 && i < 0) break;
			if (slot < 0) continue;
			if (slot >= c->P) {
				status = refuse(call, "ssm_state_indices%s is %lld, expected less than P=%lld, or a negative number for padding", place, (long long)slot, (long long)c->P);
				break;
			}
			const int64_t other = all ? claimed(all, size - 1, slot, n, i >= 0) : -1;
			if (other >= 0) {
				status = refuse(call, "ssm_state_indices%s is %lld, a slot that sequence %lld uses too, expected that no other reads or writes what one writes", place,
					(long long)slot, (long long)other);
				break;
			}
		}
	}
	free(all);
	return status;
}

#define REAL float
#define FN(name) name##_f32
#include "slots.h"
#undef REAL
#undef FN
#define REAL double
#define FN(name) name##_f64
#include "slots.h"
#undef REAL
#undef FN

static int op_decode(const gdnk_call *call) {
	const gdnk_tensor *t = call->t;
	decode c = {
		.s = {.q = t[T_decode_q], .k = t[T_decode_k], .v = t[T_decode_v], .g = t[T_decode_g], .beta = t[T_decode_beta], .A_log = t[T_decode_A_log], .dt_bias = t[T_decode_dt_bias], .cu = t[T_decode_cu_seqlens],
			.o = t[T_decode_o], .ht = t[T_decode_final_state], .l2norm = call->i[N_decode_qk_l2norm], .gate = call->i[N_decode_gate], .channels = t[T_decode_g].rank == 4,
			.lower = call->f[N_decode_lower_bound], .beta_sigmoid = call->i[N_decode_beta_sigmoid],
			.beta_max = call->i[N_decode_neg_eigval] ? 2 : 1, .v_first = call->i[N_decode_state_v_first]},
		.pool = t[T_decode_pool], .slots = t[T_decode_ssm_state_indices], .accepted = t[T_decode_num_accepted_tokens],
		.P = call->size[SZ_P], .R = t[T_decode_ssm_state_indices].rank == 1 ? 1 : call->size[SZ_R], .in_place = call->i[N_decode_in_place],
	};
	scan *s = &c.s;
	setup(s, call->size, call->f[N_decode_scale], &(gdnk_tensor){0});
	const int status = check_slots(call, &c);
	if (status) return status;
	// Heads that one thread takes in turn: while it writes the state of one it asks for that of the next. Units enough to share out.
	c.group = s->N * s->HV / (4 * gdnk_get_num_threads());
	c.group = c.group < 1 ? 1 : c.group > 8 ? 8 : c.group;
	c.groups = (s->HV + c.group - 1) / c.group;
	s->stream = 2 * tensor_bytes(&s->ht) >= STREAM_BYTES;
	will_write(&s->o), will_write(&s->ht);
	if (s->T == 0 && !s->ht.dtype) return GDNK_OK;
	if (s->q.dtype == GDNK_F64 ? decode_run_f64(&c) : decode_run_f32(&c)) return GDNK_NO_MEMORY;
	zero_rest(s, &s->o);
	return GDNK_OK;
}
