// Decoding from and to a pool of states: the check of the slots that a call follows, and the entry. The walk itself is the token form's.
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

// Sequence n of len tokens: where it begins, then where it stores.
static int check_sequence(const gdnk_call *c, const scan *s, int64_t n, int64_t len, claim *all, int64_t mask) {
	const long long accepted = s->accepted.dtype ? index_at(&s->accepted, n, 0) : 1, R = s->R, P = s->P, seq = n;
	if (accepted < 1 || accepted > R) return refuse(c, "num_accepted_tokens[%lld] is %lld, expected 1 to R=%lld", seq, accepted, R);
	if (len > R) return refuse(c, "sequence %lld has %lld tokens, expected at most R=%lld, its slots in ssm_state_indices", seq, (long long)len, R);
	for (int64_t i = -1; i < (s->in_place ? len : 0); i++) {
		const long long at = i < 0 ? accepted - 1 : i, slot = index_at(&s->slots, n, at);
		if (slot < 0 && i < 0) break; // padding
		if (slot < 0) continue;
		const long long other = all && slot < P ? claimed(all, mask, slot, n, i >= 0) : -1;
		if (slot < P && other < 0) continue;
		char place[48];
		snprintf(place, sizeof place, s->slots.rank == 2 ? "[%lld, %lld]" : "[%lld]", seq, at);
		if (slot >= P) return refuse(c, "ssm_state_indices%s is %lld, expected less than P=%lld, or a negative number for padding", place, slot, P);
		return refuse(c, "ssm_state_indices%s is %lld, a slot that sequence %lld uses too, expected that no other reads or writes what one writes", place, slot, other);
	}
	return GDNK_OK;
}
// Looks at every index that the call will follow.
static int check_slots(const gdnk_call *c, const scan *s) {
	claim *all = NULL;
	int64_t size = 16, used = 0;
	int status = GDNK_OK;
	if (!s->slots.dtype) return status;
	for (int64_t n = 0; n < s->N; n++) used += 1 + sequence_of(s, n).len;
	if (s->in_place && s->N > 1) {
		while (size < 2 * used) size *= 2;
		if (!(all = calloc(size, sizeof *all))) return GDNK_NO_MEMORY;
	}
	for (int64_t n = 0; n < s->N && !status; n++) {
		const int64_t len = sequence_of(s, n).len;
		if (len || (s->ht.dtype && s->R)) status = check_sequence(c, s, n, len, all, size - 1);
	}
	free(all);
	return status;
}

static int op_decode(const gdnk_call *c) {
	scan s = {.q = TENSOR(decode, q), .k = TENSOR(decode, k), .v = TENSOR(decode, v), .g = TENSOR(decode, g), .beta = TENSOR(decode, beta), .A_log = TENSOR(decode, A_log),
		.dt_bias = TENSOR(decode, dt_bias), .h0 = TENSOR(decode, pool), .slots = TENSOR(decode, ssm_state_indices), .accepted = TENSOR(decode, num_accepted_tokens),
		.cu = TENSOR(decode, cu_seqlens), .o = TENSOR(decode, o), .ht = TENSOR(decode, final_state), .l2norm = INT(decode, qk_l2norm), .gate = INT(decode, gate),
		.channels = TENSOR(decode, g).rank == 4, .lower = c->f[N_decode_lower_bound], .beta_sigmoid = INT(decode, beta_sigmoid), .beta_max = INT(decode, neg_eigval) ? 2 : 1,
		.v_first = INT(decode, state_v_first), .in_place = INT(decode, in_place), .P = c->size[SZ_P], .R = TENSOR(decode, ssm_state_indices).rank == 1 ? 1 : c->size[SZ_R]};
	const gdnk_tensor none = {0};
	setup(&s, c->size, c->f[N_decode_scale], &none);
	const int status = check_slots(c, &s);
	if (status) return status;
	return run_fwd(&s, &none, 1);
}
